"""Result files of the benchmark: written whole or not at all, and read again to go on.

``out.json`` holds ``{"about": {...}, "records": [...]}``, ``out.csv`` the same records. ``about``
says what the numbers hold for: hardware, versions, commit, command and configuration.
"""

import csv
import dataclasses
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flce_dist.launch.about import differences
from flce_dist.launch.bench.config import Dtype, ShapeSpec
from flce_dist.launch.bench.profiles import Profile
from flce_dist.launch.bench.report import FIELDS, Record
from flce_dist.launch.read import parse_json, read_bytes
from flce_dist.launch.write import strict_json, with_suffix, write_json, write_text
from flce_dist.launch.yaml_config import ConfigError, converted, require


@dataclass(frozen=True)
class _Problem:
    """A shape as a profile has it; older files lack what has a default."""

    T: int
    H: int
    V: int
    dtype: Dtype
    flagged: int = 0
    counted: float = 1.0
    contiguous: bool = False


class ProfiledRun(NamedTuple):
    """``shape`` as a title says it."""

    shape: str
    run: str
    profile: Profile


def trace_file(out: Path, shape: str, run: str) -> Path:
    """Return ``out.<shape>.<run>.trace.json.gz``, with nothing that a shell would ask about."""
    names = [re.sub(r"[^A-Za-z0-9._]+", "-", name.replace("=", "")) for name in (shape, run)]
    return with_suffix(out, f".{'.'.join(names)}.trace.json.gz")


def write_results(out: Path, about: dict[str, Any], records: list[Record]) -> None:
    """Replace ``out.json`` and ``out.csv``, each in one step."""
    rows = [dataclasses.asdict(record) for record in records]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(with_suffix(out, ".csv"), text.getvalue())
    write_json(with_suffix(out, ".json"), {"about": about, "records": rows})


def write_profiles(
    out: Path, about: dict[str, Any], shape: dict[str, Any], profiles: dict[str, Profile]
) -> None:
    """Put the profiles of a shape's runs, by name, into ``out.profile.json``.

    What the file has of other shapes stays if it is of the same hardware, versions and commit.
    """
    kept = [entry for entry in _profiles_so_far(out, about) if entry["shape"] != shape]
    for name, profile in profiles.items():
        kept.append({"shape": shape, "run": name, **dataclasses.asdict(profile)})
    path = with_suffix(out, ".profile.json")
    write_json(path, {"about": _of_profiles(about), "profiles": kept})


def profiled_so_far(out: Path, about: dict[str, Any], traced: bool) -> list[ShapeSpec]:
    """Return the shapes in ``out.profile.json`` if it is of this commit, hardware and versions.

    With ``traced`` those alone whose runs there have traces, too. Raises as ``read_profiles``.
    """
    shapes: dict[ShapeSpec, bool] = {}
    for entry in _profiles_so_far(out, about):
        shape = ShapeSpec(**entry["shape"])
        has_trace = trace_file(out, shape.name, entry["run"]).exists()
        shapes[shape] = shapes.get(shape, True) and (has_trace or not traced)
    return [shape for shape, is_whole in shapes.items() if is_whole]


def _profiles_so_far(out: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of ``out.profile.json``; none if it is not there, or of another commit."""
    path = with_suffix(out, ".profile.json")
    if not path.exists():
        return []
    before, entries = _read(path, *_PROFILES, _profile_entry)
    return entries if before == _of_profiles(about) else []


def _of_profiles(about: dict[str, Any]) -> Any:
    """Return what profiles of several commands have in common, as a file has it."""
    return parse_json(strict_json({key: about[key] for key in about if key != "command"}))


def read_results(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return ``about`` and the records of a JSON result file; raise ``ConfigError`` for another."""
    return _read(path, "result file", "records", lambda row, key: converted(row, Record, key))


def read_profiles(path: Path) -> tuple[dict[str, Any], list[ProfiledRun]]:
    """Return ``about`` and the runs of an ``out.profile.json``; raise as ``read_results``."""
    return _read(path, *_PROFILES, _profiled_run)


_PROFILES = "profile", "profiles"


def _read(path: Path, kind: str, key: str, item_of: Callable[[Any, str], Any]) -> Any:
    """Return ``about`` and the items under ``key`` of a file of this kind.

    ``item_of`` gets an entry and its place in the file.
    """
    expected = f"{path} must be a {kind} of the benchmark"
    try:
        content = parse_json(read_bytes(path))
        items = [item_of(entry, f"{key}[{i}]") for i, entry in enumerate(content[key])]
        return _checked_about(content["about"]), items
    except OSError as error:
        raise ConfigError(f"{expected}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"{expected}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{expected}, but is no JSON: {error}") from error
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{expected}, with about and {key}: {error!r}") from error


def _checked_about(about: Any) -> dict[str, Any]:
    """Return ``about`` if what figures take from it is what they expect."""
    require(isinstance(about, dict), f"about must hold keys and values, got {about!r:.60}")
    peers = about.get("peers", {})
    require(isinstance(peers, dict), f"about.peers must hold keys and values, got {peers!r:.60}")
    converted(about.get("ranks", 1), int, "about.ranks")
    converted(about.get("commit"), str | None, "about.commit")
    checked: dict[str, Any] = about
    return checked


def _profile_entry(entry: Any, place: str) -> dict[str, Any]:
    _profiled_run(entry, place)
    checked: dict[str, Any] = entry
    return checked


def _profiled_run(entry: Any, place: str) -> ProfiledRun:
    require(isinstance(entry, dict), f"{place} must hold keys and values, got {entry!r:.60}")
    problem = converted(entry["shape"], _Problem, f"{place}.shape")
    run = converted(entry["run"], str, f"{place}.run")
    numbers = {name: x for name, x in entry.items() if name not in ("shape", "run")}
    title = ShapeSpec(**vars(problem)).title
    return ProfiledRun(title, run, converted(numbers, Profile, place))


def records_so_far(out: Path, about: dict[str, Any]) -> list[Record]:
    """Return what an ended run of the same benchmark left, if any; what differs is an error."""
    path = with_suffix(out, ".json")
    if not path.exists():
        return []
    before, records = read_results(path)
    old = _flat(before)  # where tuples are lists
    new = _flat(parse_json(strict_json(about)))
    unlike = differences(old, new, sorted((old.keys() | new.keys()) - {"command"}))
    require(
        not unlike,
        f"{path} holds results of another benchmark: {'; '.join(unlike)}. Give another "
        "--out, or --fresh to measure everything again",
    )
    return records


def _flat(about: dict[str, Any]) -> dict[str, Any]:
    """One level deep, so that a difference can be named."""
    nested = {key: x if isinstance(x, dict) else {"": x} for key, x in about.items()}
    return {f"{key}.{name}".strip("."): x for key in nested for name, x in nested[key].items()}
