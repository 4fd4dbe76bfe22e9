"""How parts of a checkpoint get to the disk beside the training: who writes, who confirms, who is missed."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from nnlo_common.protocol._checkpoint_round import Due
from nnlo_common.protocol._query_messages import DraftAnswer, DraftQuery
from nnlo_common.training.checkpoint import Store, _saving
from nnlo_common.training.checkpoint._saving import Writer, saving_on


class Session:
    """A rank's team, as far as saving knows it; its questions go to the first server."""

    def __init__(self, rank, first, serving=None):
        self.rank, self.first, self.serving = rank, first, serving
        self.serves, self.asked = serving is not None, []
        self.world, self.algorithm = SimpleNamespace(recalled=False), SimpleNamespace(tied_to_workers="")
        role = f"server {rank}" if self.serves else f"worker {rank}"
        self.role, self.member = role, SimpleNamespace(role=role, servers=1)

    def ask(self, query):
        self.asked.append(type(query).__name__)
        return self.first.asked(self.rank, query)

    def pause(self, *, between=False):
        return True


class ServerRank:
    """A server with two workers, 2 and 3."""

    def __init__(self, idle=lambda: None):
        self.pauses, self.dead, self.wishes, self.idle = 0, set(), 0, idle
        self.service, self.parts, self.told = self, [], {}

    def want_pause(self):
        self.wishes += 1

    def saving(self):
        return {1, 2, 3} - self.dead

    def workers(self):
        return {2, 3}

    def add(self, part):
        self.parts.append(part)

    def tell(self, answers):
        self.told.update(answers)

    def asked(self, rank, query):
        """Ask as over the query service; what cannot be answered yet is None."""
        self.tell(self.parts[0].handlers[type(query)](rank, query))
        return self.told.pop(rank, None)

    def lose(self, rank):
        self.dead.add(rank)
        self.tell(self.parts[0].gone(rank, lost=True))

    def lost(self):
        return self.dead

    def wait_until(self, condition):
        for _ in range(100):
            if condition():
                return
            self.idle()
        pytest.fail("waits for ever")


class Ranks:
    """Two servers, 0 and 1, and two workers, 2 and 3, one after the other."""

    def __init__(self, folder):
        self.folder, self.store = folder, Store(folder)
        self.first, self.second = ServerRank(lambda: self.settle(1)), ServerRank()
        teams = [Session(0, self.first, self.first), Session(1, self.first, self.second)]
        teams += [Session(rank, self.first) for rank in (2, 3)]
        self.all = [
            saving_on(
                self.store if team.rank == 0 else Store(folder),
                team,
                SimpleNamespace(
                    _collect=lambda: {"step": 1},
                    _pack=lambda tree: str(tree).encode(),
                    _facts=lambda: {"servers": 2, "workers": 2},
                ),
                f"rank{team.rank}.txt",
            )
            for team in teams
        ]
        self.teams = teams

    def on(self, rank):
        return self.all[rank]

    def pause(self, ranks=(1, 2, 3), *, last=False):
        """All pause, and these go on and write."""
        self.on(0)._handle(Due(last))
        self.first.pauses += 1
        self.first.keeper.all_pause()
        for rank in ranks:
            if rank == 1:
                self.second.pauses += 1
                self.second.keeper.all_pause()
            else:
                assert self.on(rank).save()

    def settle(self, *ranks):
        for rank in ranks:
            self.on(rank)._writer.wait()
            self.on(rank).settle()

    def save(self, times=1):
        """All save, and wait until it is written."""
        for _ in range(times):
            self.pause()
            self.settle(0, 1, 2, 3)
            self.on(0).finish()


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path / "run")


def test_a_checkpoint_gets_its_name_when_all_have_confirmed_their_parts(ranks):
    ranks.pause()
    ranks.settle(0, 1, 2)
    assert ranks.store.newest() is None
    ranks.settle(3, 0)
    newest = ranks.store.newest()
    assert sorted(newest.manifest.files) == [f"rank{rank}.txt" for rank in range(4)]
    assert newest.read("rank2.txt") == b"{'step': 1}"


def test_what_is_written_is_a_copy_and_nobody_waits_for_it(tmp_path):
    going, tree = threading.Event(), {"weights": [1]}

    def pack(copied):
        assert going.wait(10)
        return str(copied).encode()

    state = SimpleNamespace(_collect=lambda: tree, _pack=pack, _facts=lambda: {"step": 1})
    saving = saving_on(Store(tmp_path), None, state, "rank0.txt")
    assert saving.save()
    tree["weights"][0] = 2
    assert Store(tmp_path).newest() is None
    going.set()
    saving.finish()
    assert Store(tmp_path).newest().read("rank0.txt") == b"{'weights': [1]}"


def test_a_worker_that_dies_before_it_has_written_costs_one_checkpoint(ranks):
    ranks.pause()
    ranks.settle(0, 1, 2)
    ranks.settle(3)
    ranks.pause(ranks=(1, 2))
    ranks.first.lose(3)
    ranks.settle(1, 2)
    with pytest.warns(RuntimeWarning, match="rank 3 has died before it had written its part"):
        ranks.on(0).finish()
    assert ranks.store.newest().manifest.number == 1
    ranks.pause(ranks=(1, 2))
    ranks.settle(1, 2)
    ranks.on(0).finish()
    newest = ranks.store.newest()
    assert "rank3.txt" not in newest.manifest.files
    assert newest.manifest.facts["workers"] == 2  # with as many it goes on


def test_a_death_that_lets_all_pause_is_told_as_one(ranks):
    """The server hears of it, and all pause, before the query service does."""
    ranks.pause()
    ranks.settle(0, 1, 2)
    ranks.first.dead.add(3)
    with pytest.warns(RuntimeWarning, match="rank 3 has died before it had written its part"):
        ranks.pause(ranks=(1, 2))
    ranks.first.lose(3)
    ranks.settle(1, 2)
    ranks.on(0).finish()
    assert ranks.store.newest() is not None  # the first or the second, as rank 3 was done writing or not


def test_who_pauses_again_without_having_confirmed_is_not_waited_for(ranks):
    ranks.pause(ranks=(1, 2))
    ranks.settle(2)
    with pytest.warns(RuntimeWarning, match=r"rank 3 has not written its part\. The previous checkpoint"):
        ranks.pause()
    ranks.settle(1, 2, 3)
    ranks.on(0).finish()
    assert ranks.store.newest() is not None


def test_a_server_that_knows_of_a_pause_before_the_first_does_is_to_wait(ranks):
    assert ranks.first.asked(1, DraftQuery(pauses=1)) is None
    ranks.pause(ranks=())
    assert ranks.first.told == {1: DraftAnswer(number=1, end=False, recalled=False)}


def test_the_end_waits_for_those_who_still_write(ranks):
    ranks.pause()
    for rank in (2, 3, 1):
        ranks.on(rank).finish()
    ranks.on(0).finish()
    assert ranks.store.newest() is not None


def test_one_that_is_due_while_another_is_written_is_left_out_and_told_of_once(ranks, caplog):
    ranks.pause(ranks=())
    with caplog.at_level(logging.WARNING):
        for rank in (2, 3):
            ranks.on(rank).want(end=False)
    assert ranks.first.wishes == 0
    assert len(caplog.records) == 1
    assert "skipped a checkpoint, because the previous one is still being written" in caplog.text
    ranks.on(2).want(end=True)  # but not the last
    assert ranks.first.wishes == 1


def test_a_part_that_the_disk_refuses_is_told_of_and_the_one_before_stays(ranks):
    ranks.pause()
    ranks.settle(0, 1, 2, 3)
    ranks.on(0).finish()
    ranks.pause(ranks=(1, 2))
    (ranks.folder / "checkpoint-000002.part" / "rank3.txt").mkdir()
    assert ranks.on(3).save()
    ranks.settle(1, 2, 3)
    with pytest.warns(
        RuntimeWarning,
        match=r"rank 3 on host .*: Is a directory; free some space .*The previous checkpoint is kept",
    ):
        ranks.on(0).finish()
    assert ranks.store.newest().manifest.number == 1


OUT_OF_MEMORY = r"Out of memory; a checkpoint needs .*The previous checkpoint is kept"


def used_up(*_):
    raise MemoryError


def used_up_for_tensors(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000 bytes.")


def used_up_behind(*_):
    """As in torch.save: the end of the file is written, although its middle could not be."""
    try:
        used_up()
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("error", [used_up, used_up_for_tensors, used_up_behind])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("what", ["_collect", "_pack"])
def test_a_part_for_which_there_is_no_memory_costs_one_checkpoint(ranks, what, rank, error):
    ranks.save()
    usual = getattr(ranks.on(rank)._state, what)
    setattr(ranks.on(rank)._state, what, error)
    with pytest.warns(RuntimeWarning, match=rf"rank {rank} on host .*: {OUT_OF_MEMORY}") as warned:
        ranks.save(times=2)
    assert len(warned) == 1
    assert ranks.store.newest().manifest.number == 1
    setattr(ranks.on(rank)._state, what, usual)
    ranks.save()
    assert ranks.store.newest().manifest.number == 4  # the numbers of the two dropped are not used again


@pytest.mark.parametrize("what", ["_collect", "_pack"])
def test_a_process_alone_without_memory_for_a_checkpoint_goes_on(what, tmp_path):
    state = SimpleNamespace(
        _collect=lambda: {"step": 1}, _pack=lambda tree: str(tree).encode(), _facts=lambda: {"step": 1}
    )
    saving = saving_on(Store(tmp_path), None, state, "rank0.txt")

    def save(times):
        for _ in range(times):
            assert saving.save()
            saving.finish()

    save(times=1)
    setattr(state, what, used_up)
    with pytest.warns(RuntimeWarning, match=OUT_OF_MEMORY) as warned:
        save(times=2)
    assert len(warned) == 1
    assert Store(tmp_path).newest().manifest.number == 1


@pytest.mark.parametrize("what", ["_collect", "_pack"])
def test_any_other_error_while_a_part_is_made_ends_the_training(what, ranks):
    setattr(ranks.on(2)._state, what, lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ranks.save()


def test_a_training_that_is_recalled_leaves_after_its_next_checkpoint_but_the_last(ranks):
    ranks.teams[0].world.recalled = True
    ranks.pause(last=True)
    ranks.settle(1, 2, 3)
    ranks.on(0).finish()
    assert not any(one.ending or one.recalled for one in ranks.all)
    ranks.pause()
    assert all(one.ending and one.recalled for one in ranks.all)


@pytest.mark.parametrize("why", ["tied", "a signal"])
def test_a_training_that_cannot_be_gone_on_with_by_others_is_not_left_for_them(ranks, why):
    ranks.teams[0].world.recalled = True
    if why == "tied":
        ranks.teams[0].algorithm.tied_to_workers = "each step is a mean"
    else:
        ranks.on(2).want(end=True)
    ranks.pause()
    assert [one.ending for one in ranks.all] == [why == "a signal"] * 4
    assert not any(one.recalled for one in ranks.all)


def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for():
    writer = Writer()
    writer.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    assert writer.wait() == 0.0


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_job_is_done_at_once_where_there_is_no_memory_for_a_thread(error, monkeypatch):
    def refuse(_thread):
        raise error

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer, done = Writer(), []
    writer.start(lambda: done.append("first"))
    assert done == ["first"]
    assert not writer.busy
    assert writer.wait() == 0.0
    writer.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()


def test_no_thread_is_begun_without_memory_for_its_beginning(monkeypatch):
    """Python would wait for ever for a thread that fails before its first line."""
    monkeypatch.setattr(_saving, "_BEGINNING_BYTES", 2**60)
    monkeypatch.setattr(threading.Thread, "start", lambda _thread: pytest.fail("was begun"))
    writer, done = Writer(), []
    writer.start(lambda: done.append("first"))
    assert done == ["first"]
