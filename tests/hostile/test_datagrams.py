"""Datagram sockets of ranks: what strangers send is dropped and counted, and costs next to nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path

import psutil
import pytest

import nnlo_common.cluster.transport._datagrams as module
from nnlo_common.cluster.transport._backoff import Wakeup
from nnlo_common.cluster.transport._datagrams import Datagrams, new_token
from nnlo_common.cluster.transport._deaths import HostPeers, ProcessAddress
from tests.helpers.jobs import running
from tests.helpers.paths import PROGRAMS
from tests.helpers.strangers import USERS, stranger

SEND = """
outside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
address, data, times = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", os.pipe()))] if sys.argv[4] else []
outside.settimeout(0.01)
for _ in range(times):
    try:
        outside.sendmsg([data], extra, 0, "\\0" + address)
    except TimeoutError:
        pass
print("sent", flush=True)
"""
FLOOD = """
outside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
outside.setblocking(False)
os.set_blocking(0, False)
print("ready", flush=True)
names, reached, text = set(), set(), ""
while True:
    try:
        text += os.read(0, 10000).decode()
    except BlockingIOError:
        pass
    *lines, text = text.split("\\n")
    names.update(lines)
    for name in names:
        for data in (b"", b"1", b"2", bytes(20), bytes(1000)):
            try:
                outside.sendto(data, "\\0" + name)
                if name not in reached:
                    reached.add(name)
                    print("sent", flush=True)
            except OSError:
                pass
"""


def sockets_of(job):
    """The names of the abstract sockets of a job's ranks; this test must not disturb those of other jobs."""
    owned = set()
    with contextlib.suppress(psutil.NoSuchProcess):  # the job has ended
        for rank in psutil.Process(job.pid).children(recursive=True):
            with contextlib.suppress(OSError):  # this rank has ended
                owned |= {str(one.readlink()) for one in Path(f"/proc/{rank.pid}/fd").iterdir()}
    listed = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {
        words[-1][1:]
        for words in listed
        if words[-1].startswith("@nnlo-") and f"socket:[{words[-2]}]" in owned
    }


@contextlib.contextmanager
def named_to(outside, job):
    """Name each socket of a job to a stranger, as soon as it is there."""
    named, over = set(), threading.Event()

    def name_them():
        while not over.wait(0.002):
            for name in sockets_of(job) - named:
                named.add(name)
                outside.stdin.write(f"{name}\n")
            outside.stdin.flush()

    naming = threading.Thread(target=name_them)
    naming.start()
    try:
        yield
    finally:
        over.set()
        naming.join()


def send(address, data, user=None, *, times=1, files=False):
    words = [address, data.hex(), str(times), "files" if files else ""]
    with stranger(SEND, *words, user=user) as outside:
        assert outside.stdout.readline() == "sent\n"


@pytest.fixture
def token():
    return new_token()


@pytest.fixture
def mine(token):
    mine = Datagrams(token)
    yield mine
    mine.close()


@pytest.fixture
def other(token):
    other = Datagrams(token)
    yield other
    other.close()


def waiting(datagrams):
    return bool(select.select([datagrams], [], [], 0)[0])


def test_ranks_reach_each_other(mine, other):
    for content in (b"", b"a", bytes(16)):
        other.send(mine.address, content)
    assert mine.received() == [b"", b"a", bytes(16)]
    assert mine.strays == 0


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("data", [b"", b"1", bytes(16), bytes(1000)], ids=["none", "short", "token", "long"])
@pytest.mark.parametrize("files", [False, True], ids=["", "with files"])
def test_what_strangers_send_is_dropped_and_counted(mine, other, user, data, files):
    send(mine.address, data, user, files=files)
    other.send(mine.address, b"ours")
    assert mine.received() == [b"ours"]
    assert mine.strays == 1


@pytest.mark.parametrize("user", [USERS[1]])
def test_another_user_is_not_believed_even_with_the_token(mine, token, user):
    send(mine.address, token + b"forged", user)
    assert mine.received() == []
    assert mine.strays == 1


def test_what_is_longer_than_any_message_is_not_cut_to_one(mine, token):
    send(mine.address, token + bytes(100))
    assert mine.received() == []


@pytest.mark.parametrize("user", USERS)
def test_after_the_first_stray_a_flood_wakes_nobody(mine, other, user, caplog):
    send(mine.address, b"x", user)
    assert waiting(mine)
    mine.received()
    send(mine.address, b"x", user, times=2000)
    assert not waiting(mine)
    other.send(mine.address, b"ours")
    assert mine.received() == [b"ours"]
    assert (mine.strays, mine.deaf_s) == (1, 0)
    (record,) = caplog.records
    assert record.getMessage().endswith("they are dropped, and harm nothing")


def test_where_the_kernel_cannot_filter_the_socket_is_deaf_for_a_while(monkeypatch, token, other):
    now = [10.0]
    mine = Datagrams(token, clock=lambda: now[0])
    monkeypatch.setattr(module, "_filter", lambda token: b"no program")
    send(mine.address, b"x", times=5)
    assert mine.received() == []
    assert mine.deaf_s == pytest.approx(0.1)
    now[0] += 0.06
    assert mine.deaf_s == pytest.approx(0.04)
    now[0] += 0.05
    assert mine.deaf_s == 0
    other.send(mine.address, b"ours")
    assert mine.received() == [b"ours"]
    send(mine.address, b"x", times=5)
    mine.received()
    assert mine.deaf_s == pytest.approx(0.1)
    mine.close()


def test_a_deaf_rank_sleeps_without_its_socket(monkeypatch, token):
    wakeup, slept = Wakeup(token), []
    monkeypatch.setattr(module, "_filter", lambda token: b"no program")
    send(wakeup.address, b"x")
    assert not wakeup.wait(30)
    monkeypatch.setattr("nnlo_common.cluster.transport._backoff.time.sleep", slept.append)
    assert not wakeup.wait(0.001)
    assert not wakeup.wait(30)
    assert slept[0] == 0.001
    assert 0 < slept[1] <= 0.1
    wakeup.close()


def test_a_stray_datagram_is_no_wake_up(token):
    wakeup, other = Wakeup(token), Wakeup(token)
    send(wakeup.address, b"")
    assert not wakeup.wait(30)
    other.wake(wakeup.address)
    assert wakeup.wait(30)
    wakeup.close()
    other.close()


# -- deaths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", USERS)
def test_forged_farewells_do_not_hide_a_death(token, user):
    """Nor does nonsense end the thread that watches."""
    with stranger("print('ready', flush=True); input()", user=None) as rank:
        rank.stdout.readline()
        mine, ends, told = ProcessAddress.own("here"), Datagrams(token), threading.Event()
        addresses = [
            ProcessAddress(mine.host, mine.space, mine.pid, ends.address),
            ProcessAddress(mine.host, mine.space, rank.pid, ""),
        ]
        HostPeers(0, addresses, ends).watch(lambda dead: dead == 1 and told.set())
        for data in (b"1", b"x", (1).to_bytes(4, "big"), bytes(16) + (1).to_bytes(4, "big")):
            send(ends.address, data, user)
        rank.kill()
        assert told.wait(30)


def test_a_farewell_of_the_job_is_believed(token):
    with stranger("print('ready', flush=True); input()", user=None) as rank:
        rank.stdout.readline()
        mine, ends, told = ProcessAddress.own("here"), Datagrams(token), []
        addresses = [
            ProcessAddress(mine.host, mine.space, mine.pid, ends.address),
            ProcessAddress(mine.host, mine.space, rank.pid, ""),
        ]
        HostPeers(0, addresses, ends).watch(told.append)
        (watching,) = [one for one in threading.enumerate() if one.name == "nnlo-host-peers"]
        HostPeers(1, addresses, Datagrams(token)).announce_end()
        rank.kill()
        watching.join(30)
        assert not watching.is_alive()
        assert told == []


@pytest.mark.mpi
@pytest.mark.parametrize("user", USERS)
def test_a_job_ends_well_beside_a_stranger_who_writes_to_all_its_sockets(user, tmp_path, monkeypatch):
    monkeypatch.setenv("NNLO_TEST_STARTS", "cold")  # the ranks are found among the launcher's children
    with stranger(FLOOD, user=user) as outside:
        assert outside.stdout.readline() == "ready\n"
        program = PROGRAMS / "neighbour.py"
        with running(3, program, str(tmp_path / "go")) as process, named_to(outside, process):
            assert process.stdout.readline() == "ready\n"
            assert outside.stdout.readline() == "sent\n"  # to a socket of this job, which waits for it
            (tmp_path / "go").touch()
            ended = process.stdout.read().splitlines()
            assert process.wait(30) == 0, process.complaints()
            assert "Traceback" not in process.complaints()
    assert ended == ["center 1.000"]


def test_an_abstract_socket_is_open_to_everybody():
    """The reason for all this: if it is no longer so, this module may go."""
    inside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inside.bind("\0nnlo-open-to-everybody")
    send("nnlo-open-to-everybody", b"x")
    assert inside.recv(10) == b"x"
    inside.close()
