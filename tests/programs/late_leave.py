"""Rank 0 closes its endpoint before rank 1's last message comes; then both meet. On 2 ranks, with ULFM."""

from mpi4py import MPI

from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.protocol import Kind, Message

world = MPIWorld(World())
disengage = world.engage()
# As those of two spares: each may serve the other, so one of them sends copies.
other, first = 1 - world.rank, world.rank == 0
here = world.open([Link(other, 0, 4, 1, serving=first), Link(other, 1, 4, 1, serving=not first)])
if first:
    here.close()
MPI.COMM_WORLD.Barrier()
if not first:
    here.send(0, Message(Kind.LEAVE, 1, 0))
    here.close()
told = world.gather_from_living(f"rank {world.rank}")
disengage()
print(told, flush=True)
