"""What a measurement holds for: hardware, versions, commit; and how a figure says so."""

import platform
import subprocess
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flce_dist


def about(device: torch.device) -> dict[str, Any]:
    """Return the hardware and versions; what is not there, or not known, is None."""
    cuda = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        "flce_dist": flce_dist.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "megatron-core": version_of("megatron-core"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
    }


def caption(about: dict[str, Any], inches: float) -> str:
    """Return hardware, commit and versions, in lines as wide as a figure if set in 7 points."""
    keys = ("flce_dist", "commit", "torch", "triton", "megatron-core", "cuda")
    packages = {key: about.get(key) for key in keys} | about.get("peers", {})
    ranks = about.get("ranks", 1)
    hardware = f"{about.get('hardware')}{f', {ranks} ranks' if ranks > 1 else ''}"
    installed = [f"{name} {version}" for name, version in packages.items() if version is not None]
    versions = textwrap.fill(", ".join(installed), round(16 * inches), break_on_hyphens=False)
    return f"{hardware}\n{versions}"


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the checkout's commit, "-dirty" behind it if files differ; None in a wheel."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
