"""The op makes its tensors' device the current one, on which Triton launches.

Without GPUs a recorder replaces the function that does so; test_gpu_execution.py needs two GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from flce_dist.kernels import eager, gpu
from flce_dist.parallel import collectives
from tests.problems import Upstream, each_schedule, run, small
from tests.test_gpu_oracle import our_call

Launches = dict[str, set[bool]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels that ran, and whether the device of their tensors had been made current."""
    current: list[torch.device] = []
    seen: Launches = {}

    @contextmanager
    def device_of(x: torch.Tensor) -> Iterator[None]:
        current.append(x.device)
        yield
        current.pop()

    def spy(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(torch.device("cpu") in current)
            return kernel(*args, **kwargs)

        return launch

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in (name for name in vars(gpu) if not name.startswith("_")):
        monkeypatch.setattr(eager, name, spy(name, getattr(eager, name)))
    return seen


@each_schedule
@pytest.mark.parametrize("compiled", [False, True])
def test_every_kernel_runs_on_the_device_of_its_tensors(launches, monkeypatch, compiled, schedule):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)  # True: by the operators
    run(our_call, small("eager"), Upstream(), schedule=schedule)
    assert {"linear_stats", "token_loss", "row_gradient"} <= set(launches)
    assert {name for name, current in launches.items() if current != {True}} == set()


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_messages_between_hosts_use_a_device_of_the_group(monkeypatch, backends, device):
    """The seed of the module, for a weight on cuda:1."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:1")
    group: Any = object()
    assert collectives.message_device(x, group) == torch.device(device)
    assert collectives.message_device(x, None) == torch.device("cpu")
