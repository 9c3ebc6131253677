"""Read a YAML file into frozen dataclasses, strictly: what does not fit is an error.

The range of a number is declared beside its type, ``steps: Annotated[int, SIZE]``, and also holds
for what the command line gives.
"""

import dataclasses
import difflib
import itertools
import reprlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml

from flce_dist.launch.program import RunError
from flce_dist.launch.ranges import declared
from flce_dist.launch.read import read_bytes

Schema = TypeVar("Schema")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
"""How a wrong value is shown: aliases in a few lines of YAML can hold more than any memory."""


class ConfigError(RunError):
    """Something the user can put right in a configuration or in how the program was started."""


def from_command_line(
    schema: type[Schema], argv: list[str], *, show_errors: bool, **program: str
) -> Schema:
    """Return ``schema`` with the values of ``--config FILE`` and of the options that override them.

    ``program`` has its name and description. A wrong command line raises SystemExit, and says why
    if ``show_errors``; a wrong key or value of the file raises ConfigError, which names it.
    """
    path, overrides = split_config_option(argv)
    check_values(argv)
    check_overrides(overrides)
    config = schema() if path is None else read_yaml(schema, path)
    import tyro  # here, so that errors in YAML do not wait for it

    shown: dict[str, Any] = {**program, "console_outputs": show_errors}
    shown["description"] = (
        f"{program.get('description', '')}\n\n--config FILE names a YAML file of values, which "
        "override the defaults; options override both. Below are the values of that file."
    ).strip()
    return tyro.cli(schema, default=config, args=overrides, **shown)


def read_yaml(schema: type[Schema], path: Path) -> Schema:
    """Return ``schema`` with the values of the file; keys it does not name keep their defaults."""
    text = read_utf8(path, "--config")
    try:
        values = yaml.load(text, _Loader)
        return converted({} if values is None else values, schema, "")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}:{line}: must be YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: must be YAML: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} must be YAML of a few levels, got too many") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Also refuses a key given twice, and says in which line a value cannot be read."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in lines:
                problem = f"key {name} is given twice, first in line {lines[name]}"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # whatever a date of month 13 or !!bool maybe leads to
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} cannot be read: {error}", node.start_mark
            ) from error


def read_utf8(path: Path, option: str) -> str:
    """Return the text of the file that ``option`` names, or raise ``ConfigError``."""
    try:
        content = read_bytes(path)
        return content.decode("utf-8")
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise ConfigError(f"{option} must name a file that can be read, got {got}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ConfigError(f"{path}:{line}: must be UTF-8, got byte 0x{byte:02x}") from error


def check_ranges(value: Any, hint: Any = None, key: str = "") -> None:
    """Raise ``ConfigError`` if a number in a dataclass, or in ``key``, is out of its range."""
    if dataclasses.is_dataclass(value):
        for name, inner in typing.get_type_hints(type(value), include_extras=True).items():
            check_ranges(getattr(value, name), inner, f"{key}.{name}" if key else name)
    elif isinstance(value, tuple):
        inners = typing.get_args(hint)
        for i, item in enumerate(value):
            check_ranges(item, inners[0 if inners[-1] is Ellipsis else i], f"{key}[{i}]")
    elif typing.get_origin(hint) is Annotated:
        expected = declared(hint)
        _, limits = typing.get_args(hint)
        good = type(value) is expected.kind and limits.holds(value)
        good |= value is None and expected.optional
        require(good, f"{key} must be {expected.words}, got {value}")


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def split_config_option(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Take ``--config FILE`` or ``--config=FILE`` out of the command line."""
    for i, arg in enumerate(argv):
        if arg.startswith("--config="):
            return Path(arg.removeprefix("--config=")), argv[:i] + argv[i + 1 :]
        if arg == "--config":
            require(i + 1 < len(argv), "--config must be followed by a YAML file")
            return Path(argv[i + 1]), argv[:i] + argv[i + 2 :]
    return None, argv


def check_values(argv: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an empty value: of a shell's unset variable, and this directory."""
    for before, arg in itertools.pairwise(["an argument", *argv]):
        option, is_set, value = arg.partition("=")
        is_empty = not arg or (arg.startswith("--") and is_set and not value)
        require(not is_empty, f"{option or before} must have a value, got ''")


def check_overrides(overrides: list[str]) -> None:
    """Raise ``ConfigError`` for what is meant as ``--config FILE``."""
    for arg in overrides:
        option = arg.partition("=")[0]
        require(option != "--config", "--config must be given once, got it twice")
        close = difflib.get_close_matches(option, ["--config"], cutoff=0.75)
        require(
            not (close and option.startswith("--")),
            f"unknown option {option}; did you mean --config?",
        )
    if overrides and overrides[0].endswith((".yaml", ".yml")):
        raise ConfigError(f"a YAML file is given by --config, got {overrides[0]} alone")


def converted(value: Any, hint: Any, key: str) -> Any:
    """Return the value of ``key`` as the annotated type; nothing but int to float is converted.

    Dictionaries become dataclasses and lists tuples. What does not fit raises ``ConfigError``.
    """
    shown = _SHORT.repr(value)
    if dataclasses.is_dataclass(hint):
        section = key or "the top level"
        require(isinstance(value, dict), f"{section} must hold keys and values, got {shown}")
        prefix = f"{key}." if key else ""
        hints = typing.get_type_hints(hint)
        fields: dict[str, Any] = {}
        for name, item in value.items():
            close = difflib.get_close_matches(str(name), hints, n=1)
            outer, _, inner_name = str(name).partition(".")
            if inner_name and dataclasses.is_dataclass(hints.get(outer)):
                raise ConfigError(f"unknown key {name}; write {inner_name} below {outer}")
            way_out = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(hints)}"
            require(name in hints, f"unknown key {prefix}{name}; {way_out}")
            fields[name] = converted(item, hints[name], f"{prefix}{name}")
        return typing.cast(Any, hint)(**fields)
    kind, optional, choices, _ = declared(hint)
    if value is None and optional:
        return None
    if kind is tuple:
        require(isinstance(value, list), f"{key} must be a list, got {shown}")
        inner = typing.get_args(hint)
        inner = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        length = f"{key} must have {len(inner)} items, got {shown}"
        require(len(value) == len(inner), length)
        of_items = enumerate(zip(value, inner, strict=True))
        return tuple(converted(item, kind, f"{key}[{i}]") for i, (item, kind) in of_items)
    if kind is Path:
        require(isinstance(value, str) and value != "", f"{key} must be a path, got {shown}")
        return Path(value)
    if kind is float and type(value) is int and abs(value) < 2**1023:  # no float beyond
        return float(value)
    advice = "; YAML reads 1e-3 as text, write 1.0e-3" if kind is float else ""
    wanted = f"one of {', '.join(choices)}" if choices else kind.__name__
    good = value in choices if choices else type(value) is kind
    require(good, f"{key} must be {wanted}, got {shown}{advice}")
    return value
