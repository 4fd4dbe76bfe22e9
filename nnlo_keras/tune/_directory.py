"""The directory of a search: one rank writes it, every file whole or not at all, and goes on from it.

Keras-tuner rewrites its files in place, and goes by all of them when it goes on. A job that is killed leaves

* half of a file: here each is written beside, and then takes the old one's place;
* a trial that was chosen, but that `oracle.json` does not know yet: it is forgotten, and chosen again;
* a trial that has ended while `oracle.json` still has it running: it stays ended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras_tuner

from nnlo_common import ConfigurationError
from nnlo_common.plugin import whole
from nnlo_keras.tune._compat import (
    file_of_oracle,
    redirect_saves,
    refill_grid,
    replace_retries,
    trial_file,
    waiting_retries,
)

__all__ = ["keep_nothing", "keep_whole", "mend", "read", "write"]


def write(path: str, content: Any) -> None:
    """Write JSON, whole or not at all."""
    with whole(Path(path)) as fresh:
        fresh.write_text(json.dumps(content))


def keep_whole(oracle: Any) -> None:
    """Let an oracle write its files whole or not at all."""
    redirect_saves(
        oracle,
        lambda: write(file_of_oracle(oracle), oracle.get_state()),
        lambda trial: write(trial_file(oracle, trial.trial_id), trial.get_state()),
    )


def keep_nothing(oracle: Any) -> None:
    """Let an oracle write nothing: the directory is another rank's."""
    redirect_saves(oracle, lambda: None, lambda trial: None)


def read(tuner: Any) -> None:
    """Let a tuner's oracle go on with what is in the directory.

    Raises:
        ConfigurationError: a file is not whole; one of ours always is.
    """
    state = Path(tuner.state_file)
    try:
        tuner.oracle.reload()
        if state.exists():  # not if the tuner is not ours
            tuner.set_state(json.loads(state.read_text()))
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"the search in {tuner.project_dir} cannot go on: a file of it is not JSON ({error}). Mend or "
            "remove it, give another project_name, or overwrite=True to begin anew"
        ) from error
    mend(tuner.oracle)


def mend(oracle: Any) -> None:
    """Make of what was read in, perhaps after a kill, a state from which an oracle goes on."""
    found = oracle.trials  # in whatever order the file system has them
    oracle.trials = {one: found[one] for one in dict.fromkeys(oracle.start_order) if one in found}
    ended = set(oracle.end_order)
    retries = dict.fromkeys(waiting_retries(oracle))
    replace_retries(oracle, [one for one in retries if one in oracle.trials and one not in ended])
    if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
        refill_grid(oracle)
