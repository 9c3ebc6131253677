"""Read a YAML file into frozen dataclasses, strictly: what does not fit is an error."""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from flce_dist.launch.program import RunError

Schema = TypeVar("Schema")


class ConfigError(RunError):
    """Something the user can put right in a configuration or in how the program was started."""


def from_command_line(
    schema: type[Schema], argv: list[str], *, prog: str, description: str, show_errors: bool
) -> Schema:
    """Return ``schema`` with the values of ``--config FILE`` and of the options that override them.

    Raises:
        ConfigError: names the wrong key or value of the file.
        SystemExit: for ``--help`` and for a wrong command line, explained if ``show_errors``.
    """
    path, overrides = split_config_option(argv)
    config = schema() if path is None else read_yaml(schema, path)
    import tyro  # here, so that errors in YAML do not wait for it

    return tyro.cli(
        schema,
        default=config,
        args=overrides,
        prog=prog,
        description=description,
        console_outputs=show_errors,
    )


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


def split_config_option(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Take ``--config FILE`` or ``--config=FILE`` out of the command line."""
    for i, arg in enumerate(argv):
        if arg.startswith("--config="):
            return Path(arg.removeprefix("--config=")), argv[:i] + argv[i + 1 :]
        if arg == "--config":
            if i + 1 == len(argv):
                raise ConfigError("--config must be followed by a YAML file")
            return Path(argv[i + 1]), argv[:i] + argv[i + 2 :]
    return None, argv


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
        converted[name] = _convert(value, hints[name], where=where, key=prefix + name)
    return schema(**converted)


def _convert(value: Any, hint: Any, *, where: str, key: str) -> Any:
    """Return ``value`` as the annotated type; nothing but int to float is converted."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _from_mapping(typing.cast(type, hint), value, where=where, prefix=f"{key}.")
    if origin is tuple:
        inner, _ = typing.get_args(hint)  # tuple[inner, ...]
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {key} must be a list, got {value!r}")
        items = enumerate(value)
        return tuple(_convert(item, inner, where=where, key=f"{key}[{i}]") for i, item in items)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [option for option in typing.get_args(hint) if option is not types.NoneType]
        return None if value is None else _convert(value, inner, where=where, key=key)
    if origin is Literal:
        options = typing.get_args(hint)
        if value not in options:
            raise ConfigError(f"{where}: {key} must be one of {', '.join(options)}, got {value!r}")
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        advice = "; YAML reads 1e-3 as text, write 1.0e-3" if hint is float else ""
        raise ConfigError(f"{where}: {key} must be {hint.__name__}, got {value!r}{advice}")
    return value
