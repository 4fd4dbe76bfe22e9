"""Warm starts: what a program sees, and how it ends, is the same as if it starts cold."""

from __future__ import annotations

import json
import signal

import psutil
import pytest

from tests.helpers.jobs import alone, mpiexec, running

pytestmark = [pytest.mark.mpi, pytest.mark.framework("torch"), pytest.mark.sampled(2)]


@pytest.fixture(autouse=True, params=["cold", "warm"])
def start(request, monkeypatch):
    monkeypatch.setenv("NNLO_TEST_STARTS", request.param)
    return request.param


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text("import json, os, signal, sys, time\nimport numpy\nimport torch\n" + text)
        return path

    return write


def test_it_sees_its_own_words_folder_and_variables(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = """
class Mine: pass
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ["MINE"],
                  sys.modules["__main__"].Mine.__module__, len(os.listdir("/proc/self/task")),
                  [name for name in sys.modules if name.startswith("nnlo")], sys.stdin.read()]))
"""
    path = program(facts)
    done = alone(path, "a b", "--c", env={"MINE": "yes"})
    assert json.loads(done.stdout) == [
        "__main__", str(path), [str(path), "a b", "--c"], str(tmp_path), str(tmp_path), "yes",
        "__main__", 1, [], "",
    ]  # fmt: skip


def test_only_a_warm_one_has_its_framework_from_a_nursery(program, start):
    done = alone(program("print(os.getppid())"))
    nurse = psutil.Process(int(done.stdout)).cmdline()
    assert any(word.endswith("nursery.py") for word in nurse) == (start == "warm")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "status", "complaint"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise ValueError('no such thing')", 1, "ValueError: no such thing"),
        ("os._exit(3)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(sys.stderr.write, 'at the end')", 0, "at the end"),
    ],
)
def test_its_end_is_that_of_the_process_that_was_started(program, text, status, complaint):
    done = alone(program(text))
    assert done.returncode == status
    assert complaint in done.stderr
    assert bool(complaint) == bool(done.stderr)


def test_each_rank_draws_its_own_numbers(program):
    done = mpiexec(
        3, program("import random\nprint(torch.rand(1).item(), numpy.random.rand(), random.random())")
    )
    drawn = [number for line in done.stdout.splitlines() for number in line.split()]
    assert len(drawn) == len(set(drawn)) == 9, done


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_it(program, number):
    text = f"""
signal.signal({int(number)}, lambda *_: (os.write(1, b"told\\n"), os._exit(0)))
print("ready", flush=True)
time.sleep(60)
"""
    with running(1, program(text)) as process:
        assert process.stdout.readline() == "ready\n"
        (rank,) = psutil.Process(process.pid).children()
        rank.send_signal(number)
        assert process.stdout.readline() == "told\n"


def test_it_is_killed_with_the_process_that_was_started(program):
    with running(1, program("print(os.getpid(), flush=True)\ntime.sleep(60)")) as process:
        itself = psutil.Process(int(process.stdout.readline()))
        (rank,) = psutil.Process(process.pid).children()
        rank.kill()
        assert not psutil.wait_procs([itself], timeout=20)[1]


@pytest.mark.extended
@pytest.mark.framework("keras")
@pytest.mark.parametrize("start", ["warm"], indirect=True)
def test_keras_on_tensorflow_begins_without_threads_and_computes_the_same(tmp_path, start, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text("""
import json, os, sys
import numpy
import keras
facts = [len(os.listdir("/proc/self/task")), keras.backend.backend(), "torch" in sys.modules]
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.1), "mse")
x = numpy.random.rand(50, 2).astype("float32")
model.fit(x, x[:, :1], epochs=2, batch_size=7, verbose=0)
print(json.dumps([os.getppid(), facts, [weights.tolist() for weights in model.get_weights()]]))
""")
    results = {}
    for way in (start, "cold"):
        monkeypatch.setenv("NNLO_TEST_STARTS", way)
        results[way] = json.loads(alone(path, env={"KERAS_BACKEND": "tensorflow"}, timeout_s=100).stdout)
        if way == "warm":
            nurse = psutil.Process(results[way][0]).cmdline()
            assert any(word.endswith("nursery.py") for word in nurse)
    assert results["warm"][1:] == results["cold"][1:]
    assert results["warm"][1] == [1, "tensorflow", False]
