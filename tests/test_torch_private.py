"""What happens in a torch that lacks one of the private names that the library uses."""

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.constants import default_pg_timeout

from flce_dist import linear_cross_entropy, torch_private
from flce_dist.parallel import transport
from flce_dist.testing import relative_rms, run_ranks
from tests.processes import environment

c10d: Any = dist.distributed_c10d
STORE = "_get_process_group_store"
names_torch = pytest.raises(NotImplementedError, match=f"which torch {torch.__version__[:4]}")


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> Any:
    def remove(owner: Any, name: str) -> None:
        monkeypatch.delattr(owner, name, raising=False)  # a newer torch may lack it already

    return remove


def gone(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    parent, _, name = module.rpartition(".")
    if parent in sys.modules:
        monkeypatch.delattr(sys.modules[parent], name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=generator).requires_grad_()
    weight = torch.randn(20, 8, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(20, (6,), generator=generator)


def test_without_word_of_retain_graph_saved_gradients_are_kept(lacks):
    lacks(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert torch_private.keeps_graph()
    hidden, weight, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels, schedule="in_forward")
    first = torch.autograd.grad(2.0 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, (hidden, weight))
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    expected = torch.autograd.grad(2.0 * F.cross_entropy(logits, labels), exact)
    for one, other, right in zip(first, second, expected, strict=True):
        assert torch.equal(one, other) and relative_rms(one, right) < 1e-6


def test_without_the_id_of_a_backward_only_overwriting_raises(lacks):
    lacks(torch._C, "_current_graph_task_id")
    hidden, weight, labels = problem()
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    linear_cross_entropy(hidden, weight, labels, accumulate_dweight=True).backward()
    weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    loss = linear_cross_entropy(hidden, weight, labels, accumulate_dweight=True)
    with names_torch:
        loss.backward()


def test_without_an_assertion_on_the_device_the_host_waits(lacks):
    lacks(torch, "_assert_async")
    torch_private.assert_soon(torch.tensor(True), "labels")
    with pytest.raises(RuntimeError, match="labels"):
        torch_private.assert_soon(torch.tensor(False), "labels")


def test_without_groups_by_name_compiled_calls_raise(lacks):
    lacks(c10d, "_resolve_process_group")
    with names_torch:
        torch_private.group_named("0")


def test_without_async_tensors_there_are_none(monkeypatch):
    gone(monkeypatch, "torch.distributed._functional_collectives")
    assert torch_private.async_tensors() == ()


def test_without_places_of_dtensors_their_state_dicts_raise():
    with names_torch:
        torch_private.place_of(torch.ones(2))  # it has none either


@pytest.mark.parametrize("name", ["none", "module", "empty", "rendezvous", "store"])
def test_without_symmetric_memory_tokens_travel_by_collectives(monkeypatch, lacks, name):
    memory = pytest.importorskip("torch.distributed._symmetric_memory")
    for there, part in ((memory, "empty"), (memory, "rendezvous"), (c10d, STORE)):
        monkeypatch.setattr(there, part, None, raising=False)
    if name == "module":
        gone(monkeypatch, "torch.distributed._symmetric_memory")
    elif name != "none":
        lacks(c10d if name == "store" else memory, STORE if name == "store" else name)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(transport, "_gpu_name", str)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda out, mine, group: out.__setitem__(0, mine)
    )
    group: Any = None
    assert transport._all_reach_all(group, torch.device("cuda", 0)) == (name == "none")


def test_without_a_groups_timeout_it_is_that_of_torch():
    minute, device = timedelta(minutes=1), torch.device("cpu")

    def timeout(backend: Any) -> timedelta:
        group: Any = SimpleNamespace(_get_backend=lambda device: backend)
        return torch_private.timeout_of(group, device)

    assert timeout(SimpleNamespace(options=SimpleNamespace(_timeout=minute))) == minute
    assert timeout(SimpleNamespace(options=SimpleNamespace())) == default_pg_timeout
    assert timeout(SimpleNamespace()) == default_pg_timeout
    group: Any = SimpleNamespace()
    assert torch_private.timeout_of(group, device) == default_pg_timeout


def test_without_the_store_no_rank_is_the_first(lacks):
    lacks(c10d, "_get_default_store")
    with names_torch:
        torch_private.default_store()


def test_without_a_world_only_forks_with_groups_raise(monkeypatch, lacks):
    lacks(c10d, "_World")
    torch_private.forget_groups()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with names_torch:
        torch_private.forget_groups()


def test_without_threaded_groups_threads_raise_and_forks_run(monkeypatch):
    gone(monkeypatch, "torch.testing._internal.distributed.multi_threaded_pg")
    assert torch_private.threaded_group() is dist.ProcessGroup
    with pytest.raises(NotImplementedError, match=r'"gloo".*which torch 2'):
        run_ranks(lambda group: 1, 2)
    assert run_ranks(lambda group: group.rank(), 2, backend="gloo") == [0, 1]


def test_the_library_is_imported_without_any():
    program = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.tensor  # torch's own use of these names
for module in ("_functional_collectives", "_symmetric_memory"):
    vars(dist).pop(module, None)
    sys.modules[f"torch.distributed.{module}"] = None
sys.modules["torch.testing._internal.distributed.multi_threaded_pg"] = None
for owner, name in (
    (torch, "_assert_async"), (torch._C, "_current_graph_task_id"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (dist.distributed_c10d, "_resolve_process_group"), (dist.distributed_c10d, "_World"),
    (dist.distributed_c10d, "_get_process_group_store"),
):
    vars(owner).pop(name, None)
import flce_dist.testing
hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
for schedule in ("recompute", "cached", "in_forward"):
    loss = flce_dist.linear_cross_entropy(hidden, weight, torch.arange(4), schedule=schedule)
    loss.backward()
print("ok")
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
