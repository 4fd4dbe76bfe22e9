"""Meeting of the ranks of a search: coordinator and all others join, exchange letters and part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nnlo_common.base._signals import Interrupts
from nnlo_common.cluster.transport._mail import DivisibleWorld, Mail
from nnlo_common.search._coordinator_mail import Letters
from nnlo_common.search._mailbox import Mailbox
from nnlo_common.search._messages import Left
from nnlo_common.search._telling import told_once

__all__ = ["Meeting", "meeting"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one rank has of a search as long as it lasts.

    Attributes:
        mail: its letter box.
        letters: those of the coordinator.
        mailbox: those of another rank.
        interrupts: the signals that have come here.
    """

    mail: Mail
    letters: Letters
    mailbox: Mailbox
    interrupts: Interrupts


@contextmanager
def meeting(world: DivisibleWorld, teams: Sequence[tuple[int, ...]], *, goes_on: str) -> Iterator[Meeting]:
    """Meet the other ranks (collective); at the end wait until nothing is under way.

    Args:
        world: the ranks; the first coordinates.
        teams: those that train, or choose, together.
        goes_on: what the same command would do after the death of a rank that nothing goes on without.

    Raises:
        PeerLostError: it has died.
    """
    mine = next((team for team in teams if world.rank in team), (world.rank,))
    hosts = world.gather_text(world.host)
    mail = world.mail()
    mailbox, letters = Mailbox(mail, 0, mine, mine.index(world.rank)), Letters(mail, teams, hosts)
    with Interrupts() as interrupts, told_once(mailbox, mail, world, hosts=hosts, goes_on=goes_on):
        yield Meeting(mail, letters, mailbox, interrupts)
        if world.rank == 0:
            letters.await_leaving()  # before the post closes
        else:
            mailbox.tell_coordinator(Left(-1))
    mail.close()
