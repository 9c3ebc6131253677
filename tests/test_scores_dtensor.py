"""DTensors as arguments of ``linear_logprob``, on forked ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flce_dist import linear_logprob
from flce_dist.testing import relative_rms
from tests.meshes import SPLIT, WHOLE, distributed, mesh_of
from tests.on_ranks import on_ranks
from tests.score_problem import T, V, each_over, problem, run_reference


@each_over
@pytest.mark.parametrize(("P", "tokens"), [(2, WHOLE), (2, SPLIT), (4, SPLIT)], ids=str)
@on_ranks("P")
def test_gradients_come_in_kind(group, P, tokens, over):
    """Of an uneven vocabulary; other dimensions of the mesh are replicated."""
    temperature = torch.linspace(0.5, 2, T, dtype=torch.float64)
    given = problem(torch.float64, rows=V + 1, over=over, temperature=temperature)
    names = list(given.upstream)
    truth = run_reference(given)
    mesh = mesh_of(*[2] * (P // 2))
    assert given.bias is not None
    placed = (given.hidden, tokens), (given.weight, SPLIT), (given.bias, SPLIT)
    leaves: list[Any] = [distributed(x, mesh, at).requires_grad_() for x, at in placed]
    hidden, weight, bias = leaves
    out = linear_logprob(
        hidden, weight, distributed(given.ids, mesh, WHOLE), bias=bias,
        tp_group=mesh.get_group(mesh.ndim - 1), sequence_parallel=tokens == SPLIT,
        **given.options | {"temperature": distributed(temperature, mesh, WHOLE)},
    )  # fmt: skip
    heads = [getattr(out, name) for name in names]
    assert all(type(x) is torch.Tensor for x in heads)
    torch.autograd.backward(heads, [given.upstream[name].double() for name in names])
    found = dict(zip(names, heads, strict=True))
    for name, x in zip(("dhidden", "dweight", "dbias"), leaves, strict=True):
        assert isinstance(x.grad, DTensor) and x.grad.placements == x.placements
        found[name] = x.grad.full_tensor()
    for name, x in found.items():
        assert relative_rms(x, truth[name]) <= 1e-11, name


@each_over
@on_ranks(2)
def test_the_local_rows_have_a_main_grad(group, over):
    """A DTensor has none, and is refused; hidden may be one."""
    given = problem(torch.float64, over=over)
    truth = run_reference(given)["dweight"]
    rows = slice(V // 2 * group.rank(), V // 2 * (group.rank() + 1))
    weight: Any = torch.nn.Parameter(given.weight[rows].clone())
    weight.main_grad = torch.ones_like(weight)
    assert given.bias is not None
    call = partial(
        linear_logprob, distribute_tensor(given.hidden, mesh_of(2), [SPLIT]),
        ids=given.ids, bias=given.bias[rows], tp_group=group, sequence_parallel=True,
        accumulate_dweight=True, **given.options,
    )  # fmt: skip
    out = call(weight=weight)
    heads = [getattr(out, name) for name in given.upstream]
    torch.autograd.backward(heads, [g.double() for g in given.upstream.values()])
    assert weight.grad is None
    assert relative_rms(weight.main_grad - 1, truth[rows]) <= 1e-11
    whole = distribute_tensor(given.weight, mesh_of(2), [SPLIT]).requires_grad_()
    with pytest.raises(NotImplementedError, match="accumulate_dweight=True needs a plain weight"):
        call(weight=whole, bias=None)


@pytest.mark.parametrize("name", ["ids", "hidden", "weight"])
@on_ranks(2)
def test_what_cannot_be_right_is_refused_by_name(group, name):
    given = problem()
    arguments: dict[str, Any] = {x: getattr(given, x) for x in ("hidden", "weight", "ids")}
    placement = Shard(1 if name == "weight" else 0)
    arguments[name] = distribute_tensor(arguments[name], mesh_of(2), [placement])
    with pytest.raises(ValueError, match=f"{name} must be a plain tensor or a DTensor with"):
        linear_logprob(**arguments, tp_group=group)
