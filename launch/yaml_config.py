"""Read a YAML file into frozen dataclasses, strictly: what does not fit is an error."""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """Something the user can put right in a configuration or in how the program was started."""


def read_yaml(schema: type[Schema], path: Path) -> Schema:
    """Return ``schema`` with the values of the file; keys it does not name keep their defaults.

    Raises:
        ConfigError: names the file, the key and what was expected.
    """
    if not path.is_file():
        raise ConfigError(f"--config must name a file, got {path}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    return _from_mapping(schema, values or {}, where=str(path), prefix="")


def _from_mapping(schema: type[Schema], values: Any, *, where: str, prefix: str) -> Schema:
    if not isinstance(values, dict):
        section = prefix.rstrip(".") or "the top level"
        raise ConfigError(f"{where}: {section} must hold keys and values, got {values!r}")
    hints = typing.get_type_hints(schema)
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(hints)}"
            raise ConfigError(f"{where}: unknown key {prefix}{name}; {hint}")
        if dataclasses.is_dataclass(hints[name]):
            section_schema = typing.cast(type, hints[name])
            converted[name] = _from_mapping(
                section_schema, value, where=where, prefix=f"{prefix}{name}."
            )
        else:
            converted[name] = _convert(value, hints[name], key=f"{where}: {prefix}{name}")
    return schema(**converted)


def _convert(value: Any, hint: Any, *, key: str) -> Any:
    """Return ``value`` as the annotated type; nothing but int to float is converted."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [option for option in typing.get_args(hint) if option is not types.NoneType]
        return None if value is None else _convert(value, inner, key=key)
    if origin is Literal:
        options = typing.get_args(hint)
        if value not in options:
            raise ConfigError(f"{key} must be one of {', '.join(options)}, got {value!r}")
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        advice = "; YAML reads 1e-3 as text, write 1.0e-3" if hint is float else ""
        raise ConfigError(f"{key} must be {hint.__name__}, got {value!r}{advice}")
    return value
