"""How many files a call runs through, from its second on: what a reader must open to follow it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy
from flce_dist.testing import run_ranks

ROOT = Path(__file__).parent.parent
T, H, V = 32, 16, 64


@contextmanager
def files_entered() -> Iterator[set[str]]:
    """The files of the library whose functions this thread calls; backward on CPU is on it, too."""
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT / "flce_dist") or path.is_relative_to(ROOT / "kernels"):
                files.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)


def entered(step: Callable[[], Any]) -> tuple[set[str], Any]:
    with files_entered() as files:
        result = step()
    return {name for name in files if "/testing/" not in name}, result


def test_files_of_a_cached_sequence_parallel_call() -> None:
    def rank(group: dist.ProcessGroup) -> tuple[set[str], set[str]]:
        hidden = torch.randn(T // 2, H, requires_grad=True)
        weight = torch.randn(V // 2, H, requires_grad=True)
        labels = torch.arange(T) % V

        def forward() -> torch.Tensor:
            options: Any = {"sequence_parallel": True, "schedule": "cached", "impl": "eager"}
            return linear_cross_entropy(hidden, weight, labels, tp_group=group, **options)

        forward().backward()
        in_forward, loss = entered(forward)
        in_backward, _ = entered(loss.backward)
        return in_forward, in_backward

    for in_forward, in_backward in run_ranks(rank, 2):
        assert "flce_dist/api.py" in in_forward
        assert "flce_dist/core/gradients.py" in in_backward
        assert len(in_forward) <= 16, sorted(in_forward)
        assert len(in_backward) <= 13, sorted(in_backward)
