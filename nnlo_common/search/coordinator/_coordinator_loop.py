"""Event loop of the coordinator's rank: passes messages, deaths, signals and time to the state machine."""

from __future__ import annotations

from nnlo_common.base._signals import Interrupts
from nnlo_common.search.coordinator._coordinator import SIGNAL, Coordinator
from nnlo_common.search.messages._coordinator_channel import CoordinatorChannel
from nnlo_common.search.messages._team_events import Death, TeamMessage

__all__ = ["check_interrupts", "run_coordinator"]

# How often the coordinator checks the clock and signals while no message arrives.
_LOOK_EVERY_S = 0.2
# Choose trials ahead only after this much silence: a block that begins asks for one parameter after another
# and must not wait for a choice in between.
_QUIET_S = 5e-3


def check_interrupts(coordinator: Coordinator, interrupts: Interrupts) -> list[TeamMessage]:
    """Interrupt running trials after a signal or at the time limit."""
    return coordinator.interrupt(SIGNAL) if interrupts.came else coordinator.look()


def run_coordinator(coordinator: Coordinator, channel: CoordinatorChannel, interrupts: Interrupts) -> None:
    """Run the coordinator until the search is over."""
    channel.deliver(coordinator.begin())
    while not coordinator.over:
        event = channel.receive(_QUIET_S)
        if event is None and coordinator.think():
            continue
        event = event or channel.receive(_LOOK_EVERY_S)
        if isinstance(event, Death):
            channel.deliver(coordinator.lost(event))
        elif event is not None:
            channel.deliver(coordinator.handle(*event))
        channel.deliver(check_interrupts(coordinator, interrupts))
