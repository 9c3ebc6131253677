"""What tests share that run on a GPU, and in a small form on a CPU, which proves them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from tests.problems import Inputs, make_inputs

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_cuda = pytest.mark.parametrize("device", [CUDA])
each_device = pytest.mark.parametrize("device", ["cpu", CUDA])

EVERY_SCHEDULE = ["recompute", "cached", "in_forward", "part cached"]  # for ``options_of``
every_schedule = pytest.mark.parametrize("schedule", EVERY_SCHEDULE)

# T, V, H of small problems; V is more than the widest window of columns.
SMALL = {"cpu": (40, 36_000, 16), "cuda": (130, 36_000, 64)}


def our_call(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor]:
    return (linear_cross_entropy(hidden, weight, labels, **options),)


def inputs_on(device: str, T: int, V: int, H: int, dtype: torch.dtype, **kwargs: Any) -> Inputs:
    return make_inputs(T, V, H, dtype, **kwargs).to(torch.device(device))


def options_of(schedule: str, inputs: Inputs) -> dict[str, Any]:
    """Keywords of a schedule; "part cached" has a budget for half of the columns."""
    if schedule != "part cached":
        return {"schedule": schedule}
    column_bytes = len(inputs.labels) * max(2, inputs.dtype.itemsize)
    return {"schedule": "cached", "max_logits_bytes": column_bytes * len(inputs.weight) // 2}


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


WARM_UP = 3  # as many as PyTorch's documentation has


class Replayed:
    """``step`` captured with all that it launches; its results stay where capture put them.

    A CPU has no graphs: there ``replay`` runs the step again.
    """

    def __init__(
        self, step: Callable[[], list[Tensor]], device: str, *, capture_error_mode: str = "global"
    ) -> None:
        self.graph: Any = None
        self.step = step
        if device == "cpu":
            self.results = step()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode=capture_error_mode):
            self.results = step()

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for buffer, result in zip(self.results, self.step(), strict=True):
            buffer.copy_(result)
