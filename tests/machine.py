"""What this machine lets the tests use: its GPUs, and the packages of the extras.

A process that has used CUDA cannot fork simulated ranks, and Triton is either interpreted or not in
a process. So one run of pytest is either for the tests with the marker ``gpu`` (``-m gpu``) or for
all others, which see no GPU.
"""

import os
import re
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

from flce_dist.launch.program import MODULES

TEST = ("hypothesis", "pytest_timeout", "setuptools", "xdist")
EXTRAS = dict.fromkeys(TEST, "test") | {
    module: extra for extra in ("train", "bench") for module in MODULES[extra]
}
"""The extra that brings a module."""
EXTRAS["pydantic"] = "train"  # mistral_common is imported without it, but not its tokenizers
OF_USERS = dict.fromkeys(("transformers", "peft", "accelerate"), "transformers-5")
"""The environment of tests/versions.py that has a module."""
_MISSING = re.compile(
    r"(?:^(?:E +)?ModuleNotFoundError: No module named|could not import|': No module named) '(\w+)",
    re.MULTILINE,
)


def missing(module: str) -> str:
    """Say how to get ``module``."""
    if module in OF_USERS:
        return (
            f"needs {module}; python -m tests.versions {OF_USERS[module]} installs it and runs this"
        )
    return f"needs {module}, which pip install '.[{EXTRAS[module]}]' installs"


def is_for_gpus(markers: str) -> bool:
    """Whether a run with ``-m markers`` takes tests of GPUs alone."""
    return markers.split(maxsplit=1)[:1] == ["gpu"]


def hide_gpus() -> None:
    """Let this process and all that it starts see no GPU, and interpret kernels.

    Before anything has asked CUDA for its devices, and before triton is imported.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if version("triton").startswith("3.9."):
        _mend_comparisons()


def _mend_comparisons() -> None:
    """Triton 3.9 interprets a comparison of two int32 as an int32, which then is no mask."""
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def mended(self: Any, left: Any, right: Any, op: Any) -> Any:
        found = computed(self, left, right, op)
        return TensorHandle(found.data, int1) if found.data.dtype == bool else found

    computed = InterpreterBuilder.binary_op
    InterpreterBuilder.binary_op = mended


def begin_with_gpu(number: int, count: int) -> None:
    """Make one of ``count`` GPUs the first that this process sees, another for the next number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = visible.split(",")
    first = number % len(devices)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])


def skip_without_gpus(items: list[pytest.Item], count: int) -> None:
    """Skip tests with the marker ``gpu(n)`` that need more than the ``count`` visible GPUs."""
    for item in items:
        for mark in item.iter_markers("gpu"):
            needed = mark.args[0] if mark.args else 1
            if needed > count:
                gpus = "1 GPU" if needed == 1 else f"{needed} GPUs"
                reason = f"needs {gpus}; only -m gpu sees GPUs"
                item.add_marker(pytest.mark.skip(reason=reason))


def name_what_is_missing(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Turn a report of a module that an absent package has into a skip; all files share a line.

    Also where a test skips itself by ``pytest.importorskip``.
    """
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    for module in [] if report.passed else _MISSING.findall(text):
        if module in {**EXTRAS, **OF_USERS} and find_spec(module) is None:
            report.outcome = "skipped"
            report.longrepr = ("pyproject.toml", None, f"Skipped: {missing(module)}")  # type: ignore[assignment]
