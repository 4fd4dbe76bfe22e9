"""Predictions: the protocol's own machines in virtual time, with measured durations.

Holds: durations, costs of a training, the simulator, rehearsed exchanges, time to a loss, advice from probes.
May import: base, algorithms, data, protocol; and `nnlo_common.testing`, whose virtual cluster it runs.
Must not know: MPI, frameworks, files.
"""

from __future__ import annotations

from nnlo_common.base._public_names import say_public_module
from nnlo_common.simulation._advice import Advice
from nnlo_common.simulation._rehearsal import ExchangeTimes, rehearse
from nnlo_common.simulation._simulator import Costs, Durations, Forecast, Ranks, simulate

__all__ = ["Advice", "Costs", "Durations", "ExchangeTimes", "Forecast", "Ranks", "rehearse", "simulate"]

say_public_module(__name__, __all__)
