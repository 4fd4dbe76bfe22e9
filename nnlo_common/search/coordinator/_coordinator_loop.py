"""The loop of the coordinator's rank: messages, deaths, signals and the clock go to the state machine."""

from __future__ import annotations

from nnlo_common.base._signals import Interrupts
from nnlo_common.search.coordinator._coordinator import SIGNAL, Coordinator
from nnlo_common.search.messages._coordinator_channel import CoordinatorChannel
from nnlo_common.search.messages._team_events import Death, TeamMessage

__all__ = ["check_interrupts", "run_coordinator"]

# How long the coordinator waits for messages before it looks at the clock and for signals.
_LOOK_EVERY_S = 0.2
# After so long without a message it chooses trials ahead: blocks that begin ask for one parameter after
# another, and are not to wait for a choice in between.
_QUIET_S = 5e-3


def check_interrupts(coordinator: Coordinator, interrupts: Interrupts) -> list[TeamMessage]:
    """Break off what is running if a signal has come, or the time is up."""
    return coordinator.interrupt(SIGNAL) if interrupts.came else coordinator.look()


def run_coordinator(coordinator: Coordinator, channel: CoordinatorChannel, interrupts: Interrupts) -> None:
    """Hand out the trials until the search is over."""
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
