"""A ``Kernel`` launches what ``triton.jit`` does: noted by a driver of a GPU that is not here.

And both implementations of the kernels can be called alike.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flce_dist.kernels import gpu as core_gpu
from flce_dist.kernels.filtered import gpu as filtered_gpu
from flce_dist.kernels.filtered.interface import FilterKernels
from flce_dist.kernels.interface import Kernels

ROOT = Path(__file__).parent.parent


def test_what_a_look_up_launches_is_what_triton_would_launch() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.noted_launches"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == ""


@pytest.mark.parametrize("names", [Kernels, FilterKernels])
def test_both_implementations_have_the_signatures_of_the_interface(names: type) -> None:
    """Those of the eager ones, which may take more, such as None."""
    gpu: Any = core_gpu if names is Kernels else filtered_gpu
    functions = [name for name in vars(names) if not name.startswith("_")]
    assert len(functions) > 10
    for name in functions:
        ours, theirs = (inspect.signature(getattr(x, name)) for x in (names, gpu))
        assert str(ours.return_annotation).replace(".eager.", ".tile_lists.") == str(
            theirs.return_annotation
        )
        pairs = zip(ours.parameters.values(), theirs.parameters.values(), strict=True)
        for a, b in pairs:
            assert (a.name, a.kind) == (b.name, b.kind), name
            assert b.default in (b.empty, a.default), (name, a)
            types = [inspect.formatannotation(x.annotation).split(".")[-1] for x in (a, b)]
            assert types[1] in types[0], (name, a, b)
