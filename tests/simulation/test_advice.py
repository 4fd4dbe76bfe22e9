"""The advice of probes whose answer is known, and a probe of a model whose noise and costs are planted."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from nnlo_common import EASGD, ConfigurationError, NoiseEstimate, Steady
from nnlo_common.commands import _advise
from nnlo_common.commands._advise import advise_with, link_of, write_advice
from nnlo_common.simulation import Advice, _advice
from nnlo_common.simulation._advice import example_facts
from nnlo_common.simulation._probe import GradientHistogram, StepParts, _TimedSteps, probe
from nnlo_common.simulation._simulator import gain_of
from nnlo_common.testing import MemoryCluster


@pytest.fixture(autouse=True, scope="module")
def fewer_layouts():
    """Leave out the largest numbers of ranks, which take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_advice, "WORKERS", (1, 2, 4, 8))
        patch.setattr(_advice, "RANKS", (4, 16))
        yield


@pytest.fixture(scope="module")
def common():
    return Advice(example_facts(noise_scale=8000, batch=100))


# What it says of planted cases.


def test_gradients_that_agree_need_one_worker():
    advice = Advice(example_facts(noise_scale=5, batch=100))
    assert advice.workers_worth_having == 1
    assert any(said.startswith("one worker") for said in advice.verdicts)
    assert "say nearly the same" in advice.verdicts[-1]


def test_a_model_that_is_long_beside_its_step_needs_one_worker():
    facts = example_facts(noise_scale=1e6, batch=100, step_s=0.001, parameters=50_000_000)
    advice = Advice(replace(facts, commit_s=0.05))
    assert advice.workers_worth_having == 1
    assert "exchange" in advice.verdicts[-1]


def test_a_step_that_hardly_grows_with_its_batch_asks_for_a_larger_one():
    facts = example_facts(noise_scale=50_000, batch=32)
    flat = {size: [0.01 + 1e-6 * size] * 5 for size in facts.steps_s}
    advice = Advice(replace(facts, steps_s=flat, read_s=[1e-6] * 5))
    assert advice.verdicts[0].startswith("a larger batch")
    best, speed, surely = advice.best_batch
    assert best == 32 * 64
    # By hand: samples a second times the progress of a sample.
    progress = {size: size / (0.01 + 1e-6 * size) / (1 + size / 50_000) for size in (32, best)}
    assert speed == pytest.approx(progress[best] / progress[32], rel=0.01)
    assert surely <= speed


def test_an_optimizer_that_was_timed_longer_than_the_whole_step_is_all_of_it():
    """The parts of a step are timed after the steps, when the machine may be slower."""
    facts = replace(example_facts(step_s=0.05), optimizer_s=0.2)
    advice = Advice(facts)
    assert [one.workers for one in advice.curve] == [1, 2, 4, 8]
    assert all(math.isfinite(one.time) and one.time > 0 for one in advice.curve)


def test_slow_reading_is_named_first():
    advice = Advice(replace(example_facts(), read_s=[0.2] * 5))
    assert "reading a batch takes 200 ms" in advice.verdicts[0]
    assert "--cache" in advice.verdicts[0]
    assert advice.costs.batch_mean_s == pytest.approx(0.2)


def test_a_model_too_large_is_a_case_for_another_tool():
    facts = example_facts(parameters=2_000_000_000)
    said = " ".join(Advice(replace(facts, left_bytes=100_000_000)).section("Memory"))
    assert "model parallelism, which nnlo does not do" in said


# Its numbers.


def test_speeds_are_the_gain_times_the_pace(common):
    for point in common.curve[1:5]:
        together = point.layout.ranks.together
        pace = point.layout.prediction.batches_per_s / common.alone.batches_per_s
        for noise, time_ in ((8000, point.time), (6400, point.high), (10_000, point.low)):
            assert 1 / time_ == pytest.approx(pace * gain_of(together, noise / 100) / together)


def test_no_point_of_the_curve_costs_less_than_one_process(common):
    hours = [point.core_hours for point in common.curve]
    assert hours[0] == pytest.approx(1)
    assert min(hours) == hours[0]
    assert all(point.low <= point.time <= point.high for point in common.curve)


def test_the_best_layout_is_the_best_of_all_candidates(common):
    speeds = [common.layout(ranks).speed for ranks in common.candidates(16)]
    assert common.layouts[16].speed == pytest.approx(max(speeds), rel=0.04)
    assert all(ranks.size == 16 for ranks in common.candidates(16))


def test_its_line_can_be_copied(common):
    one = common.layout(next(ranks for ranks in common.candidates(16) if ranks.group_size == 4))
    assert one.flags.startswith("mpiexec -n 16 nnlo train ... --mode steady")
    for name, value in one.options.items():
        assert f"--{name.replace('_', '-')} {value}" in one.flags
        assert f"{name}={value}" in one.call


def test_memory_is_a_line_in_the_batch(common):
    assert common.memory_fit == pytest.approx((200_000_000, 100_000), rel=1e-6)
    assert common.worker_bytes(1000) == pytest.approx(300_000_000 + 8_000_000, rel=1e-3)
    assert common.largest_batch == 6400  # as far as is looked
    small = Advice(replace(example_facts(), left_bytes=100_000_000))
    assert small.largest_batch == pytest.approx(1025, abs=2)  # from 25 samples on, by 100 kB each
    assert Advice(replace(example_facts(), too_large=200)).largest_batch == 400


def test_every_heading_has_sentences_and_numbers_are_finite_in_the_file(common, tmp_path, monkeypatch):
    assert 16 in common.layouts  # which stay; the other advice needs fewer
    monkeypatch.setattr(_advice, "RANKS", (2, 4))
    endless = NoiseEstimate(scale=math.inf, low=300, high=math.inf, signal=0, noise=1, batch=100)
    for advice in (common, Advice(replace(example_facts(), noise=[endless, endless]))):
        assert all(advice.lines().values())
        page = write_advice(advice, tmp_path / "advice")
        data = json.loads((tmp_path / "advice" / "advice.json").read_text())
        assert data["workers_worth_having"] == advice.workers_worth_having
        assert "What to do" in page.read_text()
        assert "samples" in str(advice)


# float16.


def histogram(values):
    found = GradientHistogram()
    found.add(np.asarray(values, np.float32))
    return found


@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**15])
def test_what_float16_loses_is_what_numpy_loses(scale):
    draws = np.random.default_rng(0)
    values = (draws.normal(size=20_000) * 10.0 ** draws.uniform(-11, -2, 20_000)).astype(np.float32)
    lost = np.mean(np.float16(scale * values) == 0)
    assert histogram(values).lost(scale) == pytest.approx(lost, abs=0.001)


def test_a_planted_underflow_is_named_with_the_scale_that_mends_it():
    draws = np.random.default_rng(1)
    tiny = (1e-9 * draws.uniform(0.5, 2, 1000)).astype(np.float32)
    plain = (1e-2 * draws.normal(size=1000)).astype(np.float32)
    layers = {"first": histogram(plain), "last": histogram(tiny)}
    advice = Advice(replace(example_facts(), histograms=layers))
    (said,) = advice.section("float16")
    assert "last (1e+02 %)" in said
    assert advice.loss_scale == 64  # 0.5e-9 is below 2^-30, and 2^-25 the least that is kept
    assert "loss scale of 64 (2^6)" in said
    assert np.mean(np.float16(advice.loss_scale * tiny) == 0) <= 0.01


def test_values_too_far_apart_need_bfloat16():
    layers = {"one": histogram([1e-12] * 9 + [3e4])}
    said = Advice(replace(example_facts(), histograms=layers)).section("float16")
    assert "use bfloat16" in said[0]


# The probe.


class Planted:
    """A quadratic with known noise, whose steps take a known time."""

    framework, device, batch, samples, slots, validated = "NumPy", "cpu", 20, 10_000, 1, True
    layers = (("a", 30), ("b", 10))

    def __init__(self, *, loss=0.5, gradient=1.0, memory=None):
        self.x, self.draws, self.loss, self.gradient_ = np.ones(40), np.random.default_rng(0), loss, gradient
        self.memory = memory

    def read(self, size):
        return size

    def step(self, batch):
        if self.memory is not None and batch > self.memory:
            raise MemoryError
        time.sleep(1e-4 + 1e-5 * batch)
        return self.loss

    def gradient(self, batch):
        return self.gradient_ * (self.x + self.draws.normal(size=40) * 3 / math.sqrt(batch))

    def step_parts(self, batch):
        return StepParts(collect_s=0.001, optimizer_s=0.002)

    def begin_memory(self):
        pass

    def peak_bytes(self):
        return 1_000_000

    def left_bytes(self):
        return 10_000_000


def test_a_probe_finds_the_noise_that_is_there():
    facts = probe(Planted(), seconds=1)
    assert len(facts.noise) == 2
    for found in facts.noise:
        assert found.low < 9 < found.high  # tr(S) = 40 * 9, |G|^2 = 40
        assert found.scale == pytest.approx(9, rel=0.35)
    assert [*facts.steps_s] == [5, 10, 20, 40, 80]
    assert facts.parameters == 40
    assert (facts.collect_s, facts.optimizer_s) == (0.001, 0.002)
    assert facts.exchanges.keys() == {Steady(), Steady(lag=1), Steady(every=4), EASGD(every=10)}
    assert facts.histograms["a"].size == 8 * 30
    assert np.median(facts.steps_s[80]) > np.median(facts.steps_s[5])


def test_the_parts_of_a_step_are_timed_for_a_while_in_the_middle_of_what_is_found():
    planted, clock = Planted(), [0.0]
    times = iter([9.0, 1.0, 3.0, 2.0, 4.0, 5.0, 0.5, 99.0])

    def took(batch):
        clock[0] += 10
        one = next(times)
        return StepParts(10 * one, one)

    planted.step_parts = took
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nnlo_common.simulation._probe.time.perf_counter", lambda: clock[0])
        assert _TimedSteps(planted).parts(65) == (30, 3)  # seven steps: at least five, and for 65 s
        assert _TimedSteps(Planted()).parts(0) == (0.001, 0.002)


def test_parts_that_cannot_be_told_are_asked_for_once():
    planted, asked = Planted(), []
    planted.step_parts = asked.append  # which returns None
    assert _TimedSteps(planted).parts(60) is None
    assert asked == [20]


def test_gradients_that_are_collected_say_how_fast_memory_is_in_a_training(common):
    unknown = replace(common.facts, collect_s=None, one_host=True, link=(0.0, 1e9))
    known = replace(unknown, collect_s=0.5)
    copied_s = 4 * unknown.parameters / unknown.copy_bytes_per_s
    for facts, one_s in ((unknown, copied_s), (known, 0.5)):
        costs = Advice(facts).costs
        assert costs.collect_s == one_s
        assert [costs.reduced_s(ranks) for ranks in (2, 3, 9)] == pytest.approx([2 * one_s] + [3 * one_s] * 2)
        assert costs.handle.mean == pytest.approx(2 * one_s, abs=1e-3)  # a contribution, and a reply


def test_a_batch_that_does_not_fit_ends_the_sizes():
    facts = probe(Planted(memory=40), seconds=1)
    assert facts.too_large == 80
    assert Advice(facts).largest_batch == 40
    assert "Batches of 80 did not fit" in " ".join(Advice(facts).section("Memory"))


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (Planted(loss=math.nan), {}, "the loss is nan in step 1"),
        (Planted(gradient=math.inf), {}, "a gradient is not finite"),
        (Planted(memory=10), {}, "does not fit into the memory of cpu with a batch of 20"),
        (Planted(), {"seconds": 0}, "seconds=0"),
        (Planted(), {"link": (1,)}, r"link=\(1,\)"),
        (Planted(), {"link": (1e-6, -1)}, "link="),
        (type("Two", (Planted,), {"samples": 2})(), {}, "there are 2 samples"),
    ],
)
def test_what_cannot_be_tried_is_refused_and_nothing_is_written(model, options, text, tmp_path):
    with np.errstate(invalid="ignore"), pytest.raises(ConfigurationError, match=text):
        advise_with(model, **{"seconds": 1, **options}, folder=tmp_path / "advice")
    assert not (tmp_path / "advice").exists()


def test_ranks_try_at_the_same_time_and_a_slow_one_is_seen(monkeypatch, common):
    facts = common.facts

    def told(world):
        slower = {100: [0.05 * (1 + world.rank)] * 5}
        return _advise._of_all_ranks(replace(facts, steps_s=slower), world)

    monkeypatch.setattr(_advise, "connect", lambda: None)
    with MemoryCluster(3) as cluster:
        found = cluster.run(told)
    assert [one.slow for one in found] == [pytest.approx((1, 2, 3))] * 3
    assert found[0].one_host
    assert Advice(found[0]).costs.slow == pytest.approx({1: 2, 2: 3})


def test_fewer_cores_than_ranks_are_said_with_what_they_are_good_for(common):
    assert common.on_this_host is None  # nothing is known of its cores
    assert Advice(replace(common.facts, cores=100_000)).on_this_host is None
    few = Advice(replace(common.facts, cores=4))
    here = few.on_this_host
    assert few.verdicts[:-1] == common.verdicts
    assert (
        f"this host has 4 cores: here {here.ranks.training} workers are {here.speed:.1f} times"
        in few.verdicts[-1]
    )
    assert here.ranks.training == 4
    assert 3.0 < here.speed < 4.0
    (said,) = Advice(replace(common.facts, cores=1)).verdicts[-1:]
    assert said.endswith("this host has 1 core: here one process is as fast as several")


def test_ranks_of_a_probe_that_shared_cores_had_a_part_of_each(common):
    crowd = replace(common.facts, slow=(1.0, 1.0, 1.0, 1.0), one_host=True, cores=2)
    assert Advice(crowd).costs.step.mean == pytest.approx(common.costs.step.mean / 2)
    assert Advice(replace(crowd, cores=8)).costs.step.mean == pytest.approx(common.costs.step.mean)


def test_a_slow_link_makes_smaller_messages_worth_having_and_no_other(monkeypatch):
    monkeypatch.setattr(_advice, "RANKS", (2, 4))
    facts = example_facts(parameters=10_000_000)

    def said(**facts_of_link):
        lines = Advice(replace(facts, **facts_of_link)).section("Layouts")
        return [line for line in lines if 'wire="int8"' in line]

    (line,) = said(link=(1e-4, 1.25e7))  # 100 Mbit/s
    times = float(line.partition("train on ")[2].partition(" times")[0])
    assert 2.5 < times <= 4.0, line  # four times is all that a quarter of the bytes can bring
    assert said(link=(2e-5, 1.2e10)) == []
    assert said(link=(1e-4, 1.25e7), one_host=True) == said(link=None) == []


def test_messages_are_as_fast_as_measured_where_ranks_were():
    facts = example_facts()  # whose memory is copied with 8 GB/s
    within, link = replace(facts, one_host=True, within_bytes_per_s=2e9), (1e-4, 1.25e7)

    def speed(facts):
        return Advice(facts).costs.bytes_per_s

    assert speed(facts) == 3e9  # a common network
    assert speed(replace(facts, one_host=True)) == 4e9
    assert speed(within) == 2e9
    assert speed(replace(within, one_host=False)) == 3e9
    assert speed(replace(within, link=link)) == 1.25e7


def test_a_link_is_given_in_microseconds_and_gigabytes():
    assert link_of("2,12.5") == (2e-6, 12.5e9)
    assert link_of(None) is None
    for text in ("2", "2,0", "a,b", "1,2,3"):
        with pytest.raises(ConfigurationError, match="--link"):
            link_of(text)


def test_values_that_are_not_finite_have_no_size():
    found = GradientHistogram()
    found.add(np.array([np.nan, np.inf, -np.inf, 0.0, 1.5], np.float32))
    assert (found.counts, found.zeros) == ({1: 1}, 1)
