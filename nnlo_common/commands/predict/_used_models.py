"""Models that a command uses: of the folder of a run, with its own options, or of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._limited_formats import LARGEST_TOML
from nnlo_common.commands.predict._use_options import UseSettings
from nnlo_common.commands.train._model_file import Loaded, check_model, load_model, plug_in
from nnlo_common.commands.train._option_files import option_text, parsed_toml
from nnlo_common.commands.train._start_weights import check_weights_file
from nnlo_common.data._standard import STANDARD

__all__ = ["UsedModel", "check_models", "load_models"]

_CONFIG = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedModel:
    """Where a model comes from; what `load_model` needs.

    Attributes:
        model: the path of its file.
        model_params: arguments of get_model().
        from_: its weights; None: the file has them.
        settings: of the command.
        features_name: the features of its training, if it is of a run.
        reading: how these were read there: padded, with masks, standardised.
    """

    model: str
    model_params: dict[str, Any]
    from_: str | None
    settings: UseSettings
    features_name: tuple[str, ...] = ()
    reading: dict[str, Any] = field(default_factory=dict)

    @property
    def allow_pickle(self) -> bool:
        """Whether files may run code: as the command says, never as the folder of a run does."""
        return self.settings.allow_pickle

    @property
    def seed(self) -> int:
        """The seed of what the file draws."""
        return self.settings.seed


def check_models(names: Sequence[str], settings: UseSettings) -> list[UsedModel]:
    """Check models without a framework; return where they come from."""
    found = [_used(name, settings) for name in names]
    for one in found:
        check_model(one)
        check_weights_file(one)
        untrained = one.from_ is None and one.model.endswith((".py", ".json"))
        if untrained:
            raise ConfigurationError(
                f"{one.model} is a model without its weights; add --from FILE, or name the folder of a run"
            )
    return found


def load_models(used: Sequence[UsedModel]) -> list[Loaded]:
    """Load models, on this rank's device; refuse several frameworks."""
    loaded = [load_model(one, Path(one.model).expanduser().resolve()) for one in used]
    kinds = sorted({one.framework for one in loaded})
    if len(kinds) > 1:
        raise ConfigurationError(f"the models are of {' and '.join(kinds)}; give models of one framework")
    for one in loaded:
        plug_in(one.framework).placed(one.model)
    return loaded


def _used(name: str, settings: UseSettings) -> UsedModel:
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        return UsedModel(
            model=str(path),
            model_params=settings.model_params,
            from_=settings.from_,
            settings=settings,
        )
    if settings.from_ is not None:
        raise ConfigurationError(f"{path} is the folder of a run, which has its weights; leave out --from")
    if not (path / _CONFIG).is_file():
        raise ConfigurationError(
            f"{path} is not the folder of a run: it has no {_CONFIG}; name a run, or the file of a model"
        )
    config = parsed_toml(option_text(path / _CONFIG, str(path), LARGEST_TOML), str(path))
    features, params = config.get("features_name", ()), config.get("model_params", {})
    features = (features,) if isinstance(features, str) else features
    if not isinstance(config.get("model"), str) or not isinstance(params, dict):
        raise ConfigurationError(
            f"{path / _CONFIG} names no model; name the file of a model instead of the run"
        )
    reading = {name: config[name] for name in ("pad", "mask") if config.get(name)}
    if (path / STANDARD).is_file():
        reading["standardize"] = path / STANDARD
    return UsedModel(
        model=config["model"],
        model_params={**params, **settings.model_params},
        from_=str(path),
        settings=settings,
        features_name=tuple(map(str, features)),
        reading=reading,
    )
