"""What happens in a torch that lacks one of the private names that the library uses."""

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from flce_dist import linear_cross_entropy
from flce_dist.parallel import transport
from flce_dist.testing import run_ranks
from flce_dist.torch_private.devices import assert_soon
from flce_dist.torch_private.dtensors import async_tensors, place_of
from flce_dist.torch_private.groups import (
    default_store,
    forget_groups,
    group_named,
    threaded_group,
    timeout_of,
)
from tests.problems import inputs
from tests.processes import started

c10d: Any = dist.distributed_c10d
STORE = "_get_process_group_store"
names_torch = pytest.raises(NotImplementedError, match=f"which torch {torch.__version__[:4]}")


def lacks(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    monkeypatch.delattr(owner, name, raising=False)  # a newer torch may lack it already


def gone(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    parent, _, name = module.rpartition(".")
    if parent in sys.modules:
        monkeypatch.delattr(sys.modules[parent], name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)


def test_without_word_of_retain_graph_saved_gradients_are_kept(monkeypatch):
    lacks(monkeypatch, torch._C._autograd, "_get_current_graph_task_keep_graph")
    given = inputs()
    hidden, weight = given.hidden.requires_grad_(), given.weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, given.labels, schedule="in_forward")
    first = torch.autograd.grad(2.0 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, (hidden, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_without_the_id_of_a_backward_only_overwriting_raises(monkeypatch):
    lacks(monkeypatch, torch._C, "_current_graph_task_id")
    given = inputs()
    hidden, weight, labels = given.hidden, given.weight.requires_grad_(), given.labels
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    linear_cross_entropy(hidden, weight, labels, accumulate_dweight=True).backward()
    weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    loss = linear_cross_entropy(hidden, weight, labels, accumulate_dweight=True)
    with names_torch:
        loss.backward()


def test_without_an_assertion_on_the_device_the_host_waits(monkeypatch):
    lacks(monkeypatch, torch, "_assert_async")
    assert_soon(torch.tensor(True), "labels")
    with pytest.raises(RuntimeError, match="labels"):
        assert_soon(torch.tensor(False), "labels")


@pytest.mark.parametrize(("name", "use"), [
    ("_resolve_process_group", lambda: group_named("0")),
    ("_get_default_store", default_store),
    ("__create_chunk_list__", lambda: place_of(torch.ones(2))),  # has none
])  # fmt: skip
def test_what_nothing_replaces_raises(monkeypatch, name, use):
    lacks(monkeypatch, c10d, name)
    with names_torch:
        use()


def test_without_async_tensors_there_are_none(monkeypatch):
    gone(monkeypatch, "torch.distributed._functional_collectives")
    assert async_tensors() == ()


@pytest.mark.parametrize("name", ["none", "module", "empty", "rendezvous", STORE])
def test_without_symmetric_memory_tokens_travel_by_collectives(monkeypatch, name):
    memory = pytest.importorskip("torch.distributed._symmetric_memory")
    owners = {"empty": memory, "rendezvous": memory, STORE: c10d}
    for part, owner in owners.items():
        monkeypatch.setattr(owner, part, None, raising=False)
    if name == "module":
        gone(monkeypatch, "torch.distributed._symmetric_memory")
    elif name in owners:
        lacks(monkeypatch, owners[name], name)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(transport, "_gpu_name", str)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda out, mine, group: out.__setitem__(0, mine)
    )
    group: Any = None
    assert transport._all_reach_all(group, torch.device("cuda", 0)) == (name == "none")


@pytest.mark.parametrize("lacking", ["nothing", "_timeout", "options", "_get_backend"])
def test_without_a_groups_timeout_it_is_that_of_torch(lacking):
    def having(name: str, value: Any) -> Any:
        return SimpleNamespace() if name == lacking else SimpleNamespace(**{name: value})

    minute = timedelta(minutes=1)
    backend = having("options", having("_timeout", minute))
    found = timeout_of(having("_get_backend", lambda _: backend), torch.device("cpu"))
    assert found == (minute if lacking == "nothing" else default_pg_timeout)


def test_without_a_world_only_forks_with_groups_raise(monkeypatch):
    lacks(monkeypatch, c10d, "_World")
    forget_groups()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with names_torch:
        forget_groups()


def test_without_threaded_groups_threads_raise_and_forks_run(monkeypatch):
    gone(monkeypatch, "torch.testing._internal.distributed.multi_threaded_pg")
    assert threaded_group() is dist.ProcessGroup
    with pytest.raises(NotImplementedError, match=r'"gloo".*which torch 2'):
        run_ranks(lambda group: 1, 2)
    assert run_ranks(lambda group: group.rank(), 2, backend="gloo") == [0, 1]


def test_the_library_is_imported_without_any(tmp_path):
    """Nor triton: eager needs none that works; what is interpreted is decided at its import."""
    program = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.tensor  # torch's own use of these names
for module in list(sys.modules):
    if module.split(".")[0] in ("flce_dist", "triton"):
        del sys.modules[module]
for module in ("_functional_collectives", "_symmetric_memory"):
    vars(dist).pop(module, None)
    sys.modules[f"torch.distributed.{module}"] = None
sys.modules["torch.testing._internal.distributed.multi_threaded_pg"] = None
for owner, names in (
    (torch, "_assert_async"), (torch._C, "_current_graph_task_id"),
    (torch._C._autograd, "_get_current_graph_task_keep_graph"),
    (dist.distributed_c10d, "_resolve_process_group _World _get_process_group_store"),
):
    for name in names.split():
        vars(owner).pop(name, None)
import flce_dist.testing
hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
for schedule in ("recompute", "cached", "in_forward"):
    loss = flce_dist.linear_cross_entropy(hidden, weight, torch.arange(4), schedule=schedule)
    loss.backward()
print("ok" * ("triton" not in sys.modules))
"""
    with started([sys.executable, "-c", program], tmp_path, forks=True) as run:
        assert run.finish() == ([0], ["ok\n"])
