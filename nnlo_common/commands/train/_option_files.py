"""Files of options: TOML and YAML read strictly, and TOML written so that it reads the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_OPTIONS, parsed_yaml
from nnlo_common.base._limited_formats import parsed_toml as limited_toml
from nnlo_common.commands.train._option import Given, Option

__all__ = ["as_toml", "option_text", "parsed_toml", "read_config"]


def read_config(path: str | Path, flag: str = "--config") -> dict[str, Given]:
    """Return the values of options in a file, by name.

    Args:
        path: of the file.
        flag: the flag that named it.

    Raises:
        ConfigurationError: it cannot be read, or is not valid.
        MissingExtraError: it is YAML, and PyYAML is not installed.
    """
    path = Path(path).expanduser()
    asked = f"{flag} {path}"
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigurationError(f"{asked} is neither .toml nor .yaml; rename it, or name another file")
    text = option_text(path, asked)
    found = parsed_toml(text, asked) if path.suffix == ".toml" else _yaml(text, asked)
    if found in (None, {}):
        raise ConfigurationError(f"{asked} is empty; write options into it, such as epochs")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigurationError(
            f"{asked} has no names of options in it, but {type(found).__name__} data; write one option per "
            f"line, e.g. {'epochs = 5' if path.suffix == '.toml' else 'epochs: 5'}"
        )
    given: dict[str, Given] = {}
    for name, value in found.items():
        plain = name.replace("-", "_")
        if plain in given:
            raise ConfigurationError(f"{asked} has {plain!r} twice; give it once")
        given[plain] = Given(value, asked)
    return given


def option_text(path: Path, asked: str, largest: int = LARGEST_OPTIONS) -> str:
    """Return the text of a file of options.

    Args:
        path: the file.
        asked: the flag and file, for messages.
        largest: bytes that are still read.

    Raises:
        ConfigurationError: it cannot be read, is too large, or is no text.
    """
    try:
        return read_whole(path, largest).decode("utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{asked} cannot be read ({error.strerror}); name a file of options"
        ) from None
    except (UnicodeDecodeError, ValueError):  # ValueError: of a zero byte in the path
        raise ConfigurationError(f"{asked} is not UTF-8 text; name a file of options") from None


def parsed_toml(text: str, asked: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: the TOML.
        asked: the flag and file, for messages.

    Raises:
        ConfigurationError: it is not valid.
    """
    try:
        return limited_toml(text)
    except ValueError as error:
        raise ConfigurationError(f"{asked} is not valid TOML: {error}; fix the file there") from None


def _yaml(text: str, asked: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError(f"{asked}, a YAML file,", "PyYAML", "yaml") from None

    try:
        return parsed_yaml(text, _strict(yaml), yaml.YAMLError)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        said = problem or str(error).splitlines()[0]
        said += " (YAML takes no tabs)" if "'\\t'" in said else ""
    except ValueError as error:  # e.g. an invalid date
        where, said = "", str(error)
    raise ConfigurationError(f"{asked}{where} is not valid YAML for options: {said}; fix the file there")


def _strict(yaml: Any) -> Any:
    """Return PyYAML's safe loader without aliases and duplicate names."""

    class Strict(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """Refuses aliases and duplicate names."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(
                    problem="aliases are not allowed; write the value", problem_mark=mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[str] = set()
            for key, _ in node.value:
                name = key.value if isinstance(key.value, str) else f"line {key.start_mark}"
                if name in names:
                    problem = f"{key.value!r} is there twice; give it once"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                names.add(name)
            return super().construct_mapping(node, deep)

    return Strict


def as_toml(values: Mapping[str, Any], options: Mapping[str, Option]) -> str:
    """Return TOML that reads as these values, options under the headings of their groups.

    Args:
        values: by name; None and empty values are left out.
        options: by name.
    """
    import tomli_w

    plain = {name: value for name, value in values.items() if value not in (None, (), {})}
    tables = {name: plain.pop(name) for name, value in values.items() if isinstance(value, Mapping) and value}
    parts = []
    for group in dict.fromkeys(option.group for option in options.values()):
        own = {name: plain[name] for name, one in options.items() if one.group == group and name in plain}
        if own:
            parts.append(f"# {group}\n{tomli_w.dumps(own)}")
    return "\n".join([*parts, tomli_w.dumps(tables)])
