"""Words of the command lines of NNLO (2019), with what to write for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["NNLO_FLAGS", "in_our_words", "values_in_our_words"]

#: Flags of NNLO's TrainingDriver.py and OptimizationDriver.py that do not exist here by the same name.
NNLO_FLAGS = {
    "--n-masters": "write --servers N",
    "--n-processes": "write --group-size N; the ranks of a group now get different samples",
    "--master-gpu": "leave it out; servers use the CPU, and workers take the GPUs of their host in turn",
    "--sync-every": "write --every N",
    "--easgd": "write --mode easgd",
    "--elastic-force": "write --beta X, divided by the workers, or --alpha X, the moving rate",
    "--elastic-lr": "write --learning-rate X; NNLO never used its --elastic-lr",
    "--elastic-momentum": "write --mode eamsgd --momentum X; NNLO never used its --elastic-momentum",
    "--gem-lr": "write --learning-rate X",
    "--gem-momentum": "write --momentum X",
    "--gem-kappa": "write --kappa X",
    "--worker-optimizer": "write --optimizer NAME; it runs where the algorithm needs it",
    "--worker-optimizer-params": "write --optimizer-option NAME=VALUE",
    "--optimizer-params": "write --optimizer-option NAME=VALUE",
    "--restore": "write --checkpoint, and rerun the same command to resume",
    "--checkpoint-interval": "write --checkpoint N for every N epochs",
    "--early": "write --early-stopping EPOCHS --early-stopping-metric NAME",
    "--validate-every": "leave it out; the centre is validated after each epoch",
    "--thread-validation": "leave it out; workers train on while the server validates",
    "--preload-data": "leave it out; a thread reads ahead, and --cache FOLDER copies the files to each host",
    "--cache-data": "write --cache FOLDER",
    "--train-data": "write --train FILE",
    "--val-data": "write --val FILE",
    "--train-list": "write --train FILE",
    "--val-list": "write --val FILE",
    "--trial-name": "write --run FOLDER",
    "--log-file": "write --log-dir FOLDER",
    "--verbose": "write --log-level info",
    "--monitor": "leave it out: every run writes it down, and nnlo report FOLDER shows it",
    "--tf": "leave it out; export KERAS_BACKEND=tensorflow chooses the back end",
    "--backend": "leave it out; get_model() decides, and KERAS_BACKEND is the back end of Keras",
    "--previous-result": "rerun the same nnlo tune command, which resumes the search in its folder",
    "--example": "write --model FILE; examples/ has models",
}
#: Flags whose value 1 is what we do without them.
_ONE = {
    "--n-masters": "leave it out: one server is the default",
    "--n-processes": "leave it out: each rank that trains is a worker",
}


def in_our_words(flag: str, value: str = "") -> str | None:
    """Return what to write for a flag of NNLO, or None if NNLO had no such flag.

    Args:
        flag: of NNLO.
        value: that was given to it, as far as it is known.

    Example:
        >>> in_our_words("--n_masters")
        'write --servers N'
        >>> in_our_words("--early", "val_loss,~<,4")
        'write --early-stopping 4 --early-stopping-metric val_loss'
    """
    flag = flag.lower().replace("_", "-")
    if flag == "--early" and (spelled := values_in_our_words({"early_stopping": value})):
        return f"write {spelled['early_stopping']}"
    return _ONE.get(flag, NNLO_FLAGS[flag]) if value == "1" and flag in NNLO_FLAGS else NNLO_FLAGS.get(flag)


_CONDITION = re.compile(r"\s*(\w+)\s*,\s*~?\s*([<>])\s*,\s*([-+.\w]+)\s*")


def values_in_our_words(given: Mapping[str, object]) -> dict[str, str]:
    """Return the options whose values are in NNLO's spelling, with what to write.

    Example:
        >>> values_in_our_words({"early_stopping": "val_loss,~<,4", "epochs": "5"})
        {'early_stopping': '--early-stopping 4 --early-stopping-metric val_loss'}
        >>> values_in_our_words({"target_metric": "val_acc,>,0.9"})
        {'target_metric': "--target-metric 'val_acc > 0.9'"}
    """
    answers = {}
    for name, value in given.items():
        found = _CONDITION.fullmatch(value) if isinstance(value, str) else None
        if name == "early_stopping" and found:
            answers[name] = f"--early-stopping {found[3]} --early-stopping-metric {found[1]}"
        if name == "target_metric" and found:
            answers[name] = f"--target-metric '{found[1]} {found[2]} {found[3]}'"
        if name == "hyper_opt" and value == "genetic":
            answers[name] = "--hyper-opt evolutionary"
    return answers
