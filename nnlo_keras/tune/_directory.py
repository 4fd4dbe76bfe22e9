"""Directory of a search: one rank writes every file whole or not at all, and resumes from them.

Keras-tuner rewrites its files in place, and reads all of them to resume. A killed job leaves

* half of a file: prevented by writing a new file beside the old one, which it then replaces;
* a chosen trial that `oracle.json` does not have yet: dropped, and chosen again;
* a finished trial that `oracle.json` still lists as running: kept as finished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras_tuner

from nnlo_common import ConfigurationError
from nnlo_common.plugin import LARGEST_JSON, parsed_json, read_whole, write_whole
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
    write_whole(Path(path), json.dumps(content))


def keep_whole(oracle: Any) -> None:
    """Make an oracle write its files whole or not at all."""
    redirect_saves(
        oracle,
        lambda: write(file_of_oracle(oracle), oracle.get_state()),
        lambda trial: write(trial_file(oracle, trial.trial_id), trial.get_state()),
    )


def keep_nothing(oracle: Any) -> None:
    """Make an oracle write nothing, because another rank owns the directory."""
    redirect_saves(oracle, lambda: None, lambda trial: None)


def read(tuner: Any) -> None:
    """Resume a tuner and its oracle from the directory.

    Raises:
        ConfigurationError: a file is damaged; files written by nnlo are whole.
        RuntimeError: the directory is of a search with another oracle, in keras-tuner's words.
    """
    state = Path(tuner.state_file)
    try:
        _check_files(Path(tuner.project_dir))
        tuner.oracle.reload()
        if state.exists():  # missing if another kind of tuner made the directory
            tuner.set_state(parsed_json(read_whole(state, LARGEST_JSON)))
        mend(tuner.oracle)
    except ConfigurationError:
        raise
    except Exception as error:  # keras-tuner raises errors of many types for content that it has not written
        if isinstance(error.__cause__, KeyError):  # its own refusal: names the directory, and what to do
            raise
        kind = "not JSON" if isinstance(error, json.JSONDecodeError) else "not of a search"
        raise ConfigurationError(
            f"the search in {tuner.project_dir} cannot resume: one of its files is {kind} ({error}). "
            "Repair or remove that file, give another project_name, or overwrite=True to start anew"
        ) from error


def _check_files(folder: Path) -> None:
    """Refuse files that keras-tuner could not read to an end, and JSON beyond our limits."""
    for pattern in ("*.json", "trial_*/trial.json"):
        for path in folder.glob(pattern):
            parsed_json(read_whole(path, LARGEST_JSON))


def mend(oracle: Any) -> None:
    """Repair an oracle's state that was read after a kill, so that it can resume."""
    found = oracle.trials  # in the file system's order
    oracle.trials = {one: found[one] for one in dict.fromkeys(oracle.start_order) if one in found}
    ended = set(oracle.end_order)
    retries = dict.fromkeys(waiting_retries(oracle))
    replace_retries(oracle, [one for one in retries if one in oracle.trials and one not in ended])
    if isinstance(oracle, keras_tuner.oracles.GridSearchOracle):
        refill_grid(oracle)
