# Written by `make generated` from the declarations of the algorithms; change those instead.

from collections.abc import Callable
from typing import Any, Literal

from nnlo_common.plugin import Algorithm
from nnlo_keras._wrapper import Wrapper

__all__ = [
    "AGN",
    "DiLoCo",
    "Downpour",
    "DynSGD",
    "EAMSGD",
    "EASGD",
    "GEM",
    "LocalSGD",
    "Steady",
    "Synchronous",
    "wrapper",
]

class AGN(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        local_learning_rate: float | None = None,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            every: steps of a worker between exchanges.
            local_learning_rate: learning rate of a worker's local steps between exchanges; without it,
                your optimizer's.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class DiLoCo(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 500,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on every worker.
            every: steps of a worker between exchanges.
            outer_learning_rate: learning rate of the outer SGD.
            outer_momentum: momentum of the outer SGD.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class Downpour(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        n_push: int | None = None,
        n_fetch: int | None = None,
        local: float | Any | None = None,
        warm_start: int = 0,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            every: steps of a worker between exchanges.
            n_push: steps between pushes, if not as every says.
            n_fetch: steps between fetches, if not as every says.
            local: learning rate of a worker's local steps between fetches; without it there are none. Or
                an optimizer of the framework over the same parameters.
            warm_start: commits of the first worker before the others join.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class DynSGD(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            every: steps of a worker between exchanges.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class EAMSGD(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        alpha: float | None = None,
        beta: float = 0.9,
        beta_per: Literal["exchange", "step"] = "exchange",
        synchronous: bool = False,
        sub_servers: int | Literal["host"] = 0,
        sub_every: int = 10,
        sub_alpha: float | None = None,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: the framework's SGD with momentum and nesterov=True, and nothing else. It makes no
                steps: the algorithm takes its learning rate and momentum.
            every: steps of a worker between exchanges.
            alpha: the moving rate, in place of beta.
            beta: the common pull of all workers: p alpha for p of them.
            beta_per: whether beta is for an exchange or a step: 'exchange' or 'step'.
            synchronous: wait for all workers at each exchange.
            sub_servers: servers between the top server and the workers; host: one on each host.
            sub_every: exchanges of a sub-server's workers between two of its own.
            sub_alpha: the moving rate of sub-servers, with the top server; else from beta.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class EASGD(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        alpha: float | None = None,
        beta: float = 0.9,
        beta_per: Literal["exchange", "step"] = "exchange",
        order: Literal["paper", "step_first"] = "step_first",
        synchronous: bool = False,
        sub_servers: int | Literal["host"] = 0,
        sub_every: int = 10,
        sub_alpha: float | None = None,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on every worker.
            every: steps of a worker between exchanges.
            alpha: the moving rate, in place of beta.
            beta: the common pull of all workers: p alpha for p of them.
            beta_per: whether beta is for an exchange or a step: 'exchange' or 'step'.
            order: whether the exchange or the step comes first: 'paper' or 'step_first'.
            synchronous: wait for all workers at each exchange.
            sub_servers: servers between the top server and the workers; host: one on each host.
            sub_every: exchanges of a sub-server's workers between two of its own.
            sub_alpha: the moving rate of sub-servers, with the top server; else from beta.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class GEM(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        kappa: float = 1.0,
        clip: float | None = 5.0,
        primed: bool = True,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: the framework's SGD with momentum, and nothing else. It makes no steps: the
                algorithm takes its learning rate and momentum.
            every: batches whose gradients are averaged for one step.
            kappa: limit of the collective's energy, in units of the proxy's.
            clip: upper bound of pi, how much larger than the gradient's a step may be.
            primed: take the first centre as the first stale centre.
            lag: delay of the gradients, in steps.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class LocalSGD(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 10,
        warmup: int = 0,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on every worker.
            every: steps of a worker between exchanges.
            warmup: number of first steps that are each averaged.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class Steady(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        passes: Literal["progress", "fixed"] = "progress",
        synchronous: bool = False,
        memory: float | None = None,
        brake: float = 1.5,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            every: steps of a worker between exchanges.
            passes: what ends an epoch: its progress, or one pass over the samples: 'progress' or 'fixed'.
            synchronous: commit the mean of all workers, who step together.
            memory: least steps of a worker that the momentum remembers; else 4, or 2 together.
            brake: most length of a gradient, in running root mean squares; 0: any.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

class Synchronous(Wrapper):
    def __init__(
        self,
        optimizer: Any,
        *,
        backup: int = 0,
        lag: int = 0,
        wire: Literal["float32", "bfloat16", "float16", "int8", "topk"] = "float32",
        servers: int = 1,
        group_size: int | None = None,
        all_reduce: Literal["auto", "mpi", "bfloat16", "shared"] = "auto",
        stall_timeout_s: float | None = None,
        spares: int = 0,
        heir: bool | None = None,
        overlap: bool = False,
        name: str | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: yours; it runs on the server.
            backup: number of slowest workers that a commit does not wait for.
            lag: exchanges that may be under way while the worker trains on.
            wire: how numbers travel between workers and servers: 'float32' or 'bfloat16' or 'float16' or
                'int8' or 'topk'.
            servers: number of ranks that serve the centre, each a part of it; 0: none, and all ranks are
                one group that steps the optimizer with the mean gradient.
            group_size: ranks that train as one worker, each step with the mean of their gradients,
                weighted by their samples; else 1, or all with servers=0.
            all_reduce: how these ranks add up their gradients; auto is the fastest of shared and mpi that
                works here: 'auto' or 'mpi' or 'bfloat16' or 'shared'.
            stall_timeout_s: drop a worker that is silent so many seconds on its turn if the rest can
                continue, or end the job; else it is only named.
            spares: number of ranks, the last ones, that hold copies of servers' states and serve in the
                place of one that has died; those that no server needs take the places of dead workers;
                mpiexec --with-ft ulfm.
            heir: the first worker holds a copy of the server's state, and serves in its place once it has
                died, with several servers as many workers, one for each; else it does so under mpiexec
                --with-ft ulfm, where it can and memory allows.
            overlap: send a gradient to the servers while the backward pass makes the rest of it; PyTorch
                on CPUs, also under Keras, an exchange in each step, lag=0.
            name: as for any optimizer.
        """

def wrapper(algorithm: type[Algorithm]) -> Callable[..., Wrapper]: ...
