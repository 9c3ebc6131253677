"""What a measurement holds for: hardware, versions, commit; and how a figure says so."""

import platform
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flce_dist

VERSIONS = ("flce_dist", "commit", "torch", "triton", "megatron-core", "cuda")
"""Keys of ``about`` that a figure names, beside peers'."""


def about(device: torch.device) -> dict[str, Any]:
    """Return the hardware and versions; what is not there, or not known, is None."""
    cuda = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        "flce_dist": flce_dist.__version__,
        "commit": _commit(Path(__file__).resolve()),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "megatron-core": version_of("megatron-core"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
    }


def caption(measurements: Sequence[dict[str, Any]], inches: float) -> str:
    """Return the hardware, commits and versions of measurements on one kind of hardware.

    In lines as wide as a figure of so many inches if set in 7 points.
    """
    hardware = str(measurements[0].get("hardware"))
    ranks = {facts.get("ranks", 1) for facts in measurements}
    if len(ranks) == 1 and ranks != {1}:
        hardware += f", {ranks.pop()} ranks"
    versions_of = dict[str, dict[str, None]]()  # of each package the versions, in order
    for facts in measurements:
        packages = {key: facts.get(key) for key in VERSIONS} | facts.get("peers", {})
        for name, installed in packages.items():
            if installed is not None:
                versions_of.setdefault(name, {})[installed] = None
    below = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in versions_of.items())
    return f"{hardware}\n{textwrap.fill(below, round(16 * inches), break_on_hyphens=False)}"


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def differences(before: dict[str, Any], now: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """Say of which of these facts a file of before and this run have other values."""
    return [
        f"{key} is {before.get(key)!r} there and {now.get(key)!r} here"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _commit(file: Path) -> str | None:
    """Return the checkout's commit, "-dirty" behind it if files differ; None in a wheel.

    A wheel's files may lie in a checkout of something else, which does not know them.
    """
    is_known = ["git", "ls-files", "--error-unmatch", file.name]
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        runs = [
            subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=10)
            for command in (is_known, describe)
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if any(run.returncode for run in runs) else runs[1].stdout.strip()
