"""A ``Kernel`` launches what ``triton.jit`` does: noted by a driver of a GPU that is not here."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flce_dist.kernels.filtered.interface import FilterKernels, filter_kernels_of
from flce_dist.kernels.interface import Kernels, kernels_of

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


@pytest.mark.parametrize(
    "interface, of", [(Kernels, kernels_of), (FilterKernels, filter_kernels_of)]
)
def test_triton_and_eager_have_the_functions_of_the_interface(interface, of):
    for name in (name for name in vars(interface) if not name.startswith("__")):
        triton, eager = (inspect.signature(getattr(of(impl), name)) for impl in ("triton", "eager"))
        assert described(triton) == described(eager), name


def described(signature: inspect.Signature) -> list[object]:
    of_result = inspect.Parameter("result", inspect.Parameter.KEYWORD_ONLY)
    return [
        (one.name, one.kind, re.sub(r"[\w.]+\.", "", inspect.formatannotation(one.annotation)))
        for one in (
            *signature.parameters.values(),
            of_result.replace(annotation=signature.return_annotation),
        )
        if one.name != "count"  # which ``gemm.product`` need not get
    ]
