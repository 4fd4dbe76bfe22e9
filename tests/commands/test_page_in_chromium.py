"""The page of `nnlo report` in headless Chromium: three widths, light and dark, without a network."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from nnlo_common.commands._cli import main
from nnlo_common.commands._html_page import drawn
from nnlo_common.commands.report._report_command import runs_page
from nnlo_common.commands.report._run_figures import run_figures
from nnlo_common.commands.report._verdicts import verdicts
from nnlo_common.search import optimize
from tests.commands.test_report import SERVER, WORKERS, epochs, run_of
from tests.helpers.chromium import CHROMIUM, opened

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

#: Appended to the page: leaves what a reader sees as JSON, once all is drawn.
LOOK = """
<script>
const problems = [];
window.addEventListener("error", found => problems.push(String(found.message)));
window.addEventListener("load", () => setTimeout(() => {
  const plots = [...document.querySelectorAll(".js-plotly-plot")];
  const facts = {
    problems,
    background: getComputedStyle(document.body).backgroundColor,
    text: getComputedStyle(document.body).color,
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    width: window.innerWidth,
    plots: plots.map(one => ({
      drawn: one.querySelectorAll(".main-svg").length > 0 && one.getBoundingClientRect().height > 100,
      wider: one.getBoundingClientRect().right - document.documentElement.clientWidth,
      axes: [...one.querySelectorAll(".xtick, .ytick")].length,
      titles: [...one.querySelectorAll(".xtitle, .ytitle")].map(title => title.textContent),
    })),
  };
  const told = document.createElement("pre");
  told.id = "facts";
  told.textContent = JSON.stringify(facts);
  document.body.append(told);
}, 1000));
</script>
"""


def page_of_runs():
    server = run_of(replace(SERVER, epochs=epochs(90, 91, 92)), *WORKERS)
    slower = run_of(*server.ranks[:3], folder="runs/net-2")
    runs = [server, slower]
    return runs_page(runs, [verdicts(one) for one in runs], drawn(run_figures(runs)))


def page_of_a_search(folder):
    """The page of a search in a script, which is written from its journal."""
    optuna = pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")

    def objective(trial):
        width = trial.suggest_int("a_parameter_with_a_long_name", 1, 64, log=True)
        trial.report(1 / width, 0)
        return 1 / width * trial.suggest_float("rate", 0.1, 1)

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    optimize(study, objective, n_trials=12, journal=folder / "search.jsonl")
    assert main(["report", str(folder / "search.jsonl")]) == 0
    return (folder / "search.html").read_text()


PAGES = {"runs": lambda folder: page_of_runs(), "search": page_of_a_search}


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [500, 900, 1600])  # Chromium is no narrower without a screen
def test_the_page_is_whole_at_each_width_in_light_and_dark(width, dark, kind, tmp_path):
    pytest.importorskip("plotly", reason="the environment for MPICH has no plotly")
    text = PAGES[kind](tmp_path)
    path = tmp_path / "page.html"
    path.write_text(text.replace("<body>", f"<body>{LOOK}", 1))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = opened(path, f"--window-size={width},900", scheme)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    facts = json.loads(unescape(re.search(r'<pre id="facts">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert facts["problems"] == []
    assert facts["width"] == width
    assert facts["wider"] <= 0  # nothing makes the whole page scroll sideways
    ground, ink = (sum(map(int, re.findall(r"\d+", facts[name])[:3])) for name in ("background", "text"))
    assert (ground < 150 < 500 < ink) if dark else (ink < 200 < 700 < ground)
    assert facts["plots"]
    for plot in facts["plots"]:
        assert plot["drawn"]
        assert plot["axes"]
        assert plot["wider"] <= 0
        assert all(plot["titles"])
        assert len(plot["titles"]) >= 1
