"""``LinearCrossEntropyParallel`` on forked gloo ranks, beside an fp64 head on one process."""

import copy
import functools
import io
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flce_dist import LinearCrossEntropy
from flce_dist.parallel_style import LinearCrossEntropyParallel
from flce_dist.testing import relative_rms
from tests.on_ranks import on_ranks
from tests.processes import ROOT

B, S, H, VOCAB = 2, 8, 16, 37  # uneven shards
BUDGET = 1e-5  # relative RMS in fp32


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


class Model(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, H)
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)
        self.lm_head = nn.Linear(H, VOCAB, bias=bias)

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.embedding(tokens)).relu())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.lm_head(self.trunk(tokens), labels)


def made(bias: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(bias)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, B, S), generator=generator)
    labels[0, :3] = -100
    return tokens, labels


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def truth(model: Model, hidden: Tensor, labels: Tensor, **terms: float) -> dict[str, Any]:
    """fp64: the logits, the loss and its gradients."""
    head, hidden = copy.deepcopy(model.lm_head).double(), hidden.detach().double().requires_grad_()
    logits = terms.get("logit_scale", 1.0) * F.linear(hidden, head.weight)
    if head.bias is not None:
        logits = logits + head.bias
    if "softcap" in terms:
        logits = terms["softcap"] * (logits / terms["softcap"]).tanh()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    found: dict[str, Any] = {"logits": logits, "loss": loss, "hidden": hidden.grad}
    return found | {name: x.grad for name, x in head.named_parameters()}


CASES = {
    "replicated": (2, False, None, {}),
    "sequence parallel": (2, False, Shard(1), {}),
    "first dimension": (4, True, Shard(0), {"schedule": "in_forward"}),
    "bias and softcap": (4, True, Shard(1), {"softcap": 2.0, "logit_scale": 0.7}),
}


@pytest.mark.parametrize(("P", "rows", "S"), [(1, 1, 4), (2, 1, 4), (4, VOCAB, 0), (4, 2, 4)])
@on_ranks("P")
def test_logits_of_few_rows_or_no_tokens(group, P, rows, S):
    torch.manual_seed(0)
    whole_head = nn.Linear(H, rows)
    head: Any = copy.deepcopy(whole_head)
    parallelize_module(
        nn.ModuleDict({"head": head}), mesh_of(P), {"head": LinearCrossEntropyParallel()}
    )
    gradients = []
    for one in (head, whole_head):
        hidden = torch.randn(B, S, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        logits = one(hidden)
        assert logits.shape == (B, S, rows)
        (logits * torch.arange(1.0, rows + 1)).square().sum().backward()
        gradients.append(
            [logits.detach(), hidden.grad, whole(one.weight.grad), whole(one.bias.grad)]
        )
    torch.testing.assert_close(*gradients)


@on_ranks(2)
def test_ranks_that_ask_for_other_logits(group):
    """At the first call they compare what they ask for, also if one rank's is refused."""
    model: Any = made()
    style = LinearCrossEntropyParallel(input_layouts=Shard(1))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"lm_head": style})
    given = {
        "hidden must be [..., H] with H = 16 from weight, got (2, 4, 15)": torch.zeros(B, 4, H - 1),
        "hidden must be [B, S / P, ..., H] with sequence_dim=1": torch.zeros(4, H),
        "hidden must have weight's dtype torch.float32, got": torch.zeros(B, 4, H).double(),
        "hidden.shape is [2, 4, 16] on rank 0 and [2, 5, 16] on rank 1": torch.zeros(B, 5, H),
    }
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"}):
        for said, wrong in given.items():
            hidden = wrong if group.rank() == 1 else torch.zeros(B, 4, H)
            with pytest.raises(ValueError, match=re.escape(said)):
                model.lm_head(hidden)


@pytest.mark.parametrize("is_dtensor", [False, True])
@pytest.mark.parametrize(("P", "bias", "layout", "options"), CASES.values(), ids=CASES)
@on_ranks("P")
def test_loss_logits_and_gradients(group, P, bias, layout, options, is_dtensor):
    mesh, model = mesh_of(P), made(bias)
    tokens, labels = batch()
    hidden = model.trunk(tokens).detach()
    if layout == Shard(0):  # [S, B, H]
        hidden, labels = hidden.transpose(0, 1).contiguous(), labels.T.contiguous()
    expected = truth(model, hidden, labels, **{k: x for k, x in options.items() if k != "schedule"})
    style = LinearCrossEntropyParallel(input_layouts=layout, **options)
    parallelize_module(model, mesh, {"lm_head": style})
    head = model.lm_head
    assert isinstance(head, nn.Linear)
    assert all(x.placements == (Shard(0),) for x in head.parameters())  # type: ignore[attr-defined]
    mine = hidden if layout is None else hidden.chunk(P, layout.dim)[group.rank()].contiguous()
    mine.requires_grad_()
    given: Any = DTensor.from_local(mine, mesh, [layout or Replicate()]) if is_dtensor else mine
    logits = head(given)
    assert type(logits) is Tensor
    assert relative_rms(logits.double(), expected.pop("logits")) < BUDGET
    of_logits = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for loss in (head(given, labels), of_logits):
        mine.grad = None
        model.zero_grad()
        loss.backward()
        assert type(loss) is Tensor and mine.grad is not None
        dhidden = DTensor.from_local(mine.grad, mesh, [layout or Replicate()]).full_tensor()
        found = {"loss": loss, "hidden": dhidden}
        for name, parameter in head.named_parameters():
            assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == (Shard(0),)
            found[name] = parameter.grad.full_tensor()
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert relative_rms(found[name].double(), x) < BUDGET, name


STYLES: dict[str, Any] = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "lm_head": LinearCrossEntropyParallel(),
}


def trainer(shape: tuple[int, ...], seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    """The model over the last dimension of a mesh, under FSDP2 over the first if there are two.

    In torch's idiom: the optimizer saves through torch.distributed.checkpoint.
    """
    torch.manual_seed(seed)
    model, mesh = Model(), mesh_of(*shape)
    parallelize_module(model, mesh["tp"], STYLES)
    if len(shape) == 2:
        fully_shard(model.lm_head, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for module in (model.lm_head, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Model, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    """All ranks have the same tokens, so FSDP2's average is the gradient of one process."""
    loss = model(*batch(seed))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def expected_losses() -> Tensor:
    model, losses = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(4):
        tokens, labels = batch(seed)
        logits = model.lm_head(model.trunk(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def save_rank(group: dist.ProcessGroup, shape: tuple[int, ...], path: Any) -> Tensor:
    model, optimizer = trainer(shape)
    losses = [step(model, optimizer, seed) for seed in range(2)]
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
    return torch.stack(losses)


def load_rank(group: dist.ProcessGroup, shape: tuple[int, ...], path: Any) -> Tensor:
    model, optimizer = trainer(shape, seed=5)
    state, of_optimizer = get_state_dict(model, optimizer)
    held: dict[str, Any] = {"model": state, "optimizer": of_optimizer}
    dcp.load(held, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    moments = optimizer.state[model.lm_head.weight]["exp_avg"]
    assert isinstance(moments, DTensor) and moments.shape == (VOCAB, H)
    return torch.stack([step(model, optimizer, seed) for seed in (2, 3)])


def page() -> dict[str, Any]:
    """Return the functions of the page's last block."""
    text = (ROOT / "docs" / "parallel_style.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[-1], names)
    return names


def page_rank(group: dist.ProcessGroup, dp: int, folder: Any, seeds: tuple[int, ...]) -> Tensor:
    """Train on ``dp`` x the other ranks, from the checkpoint or else to it; return the losses."""
    of_page = page()
    model = made()
    of_page["parallelize"](model, dp, group.size() // dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if 0 not in seeds:
        of_page["load"](model, optimizer, folder)
    losses = [step(model, optimizer, seed) for seed in seeds]
    if 0 in seeds:
        of_page["save"](model, optimizer, folder)
    return torch.stack(losses)


def test_the_page_with_fsdp_and_checkpoints(pools, tmp_path):
    expected = expected_losses()
    for dp, seeds in ((2, (0, 1)), (1, (2, 3))):
        found = pools[4].run(page_rank, dp, tmp_path / "checkpoint", seeds)
        assert all(torch.equal(found[0], x) for x in found)
        assert relative_rms(found[0], expected[list(seeds)]) < BUDGET


MESHES = [((2,), (4,)), ((2, 2), (2,)), ((4,), (2, 2)), ((2, 1), (1, 2))]
"""Saved by and loaded on (tensor-parallel) or (data-, tensor-parallel) ranks."""


@pytest.mark.parametrize(("saved", "loaded"), MESHES, ids=str)
def test_optimizers_go_through_checkpoints_to_another_mesh(pools, tmp_path, saved, loaded):
    expected = expected_losses()
    first = pools[torch.Size(saved).numel()].run(save_rank, saved, tmp_path / "checkpoint")
    second = pools[torch.Size(loaded).numel()].run(load_rank, loaded, tmp_path / "checkpoint")
    for losses, part in ((first, expected[:2]), (second, expected[2:])):
        assert all(torch.equal(losses[0], x) for x in losses)
        assert relative_rms(losses[0], part) < BUDGET


@on_ranks(2)
def test_a_tied_embedding_copies_and_pickles(group):
    mesh, model = mesh_of(2), made()
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
    model.lm_head.weight = model.embedding.weight
    weight = model.lm_head.weight
    parallelize_module(model, mesh, {"lm_head": LinearCrossEntropyParallel()})
    assert model.lm_head.weight is weight
    model(*batch()).backward()
    assert weight.grad is not None and whole(weight.grad).count_nonzero()
    assert "weight" in model.lm_head.state_dict() and "out_features=37" in repr(model.lm_head)
    head = copy.deepcopy(model.lm_head)
    hidden, (_, labels) = torch.randn(B, S, H), batch()
    assert torch.equal(head(hidden, labels), model.lm_head(hidden, labels))
    file = io.BytesIO()
    torch.save(model.lm_head.state_dict(), file)


@on_ranks(4)
def test_what_is_refused(group):
    mesh = mesh_of(2, 2)
    apply = LinearCrossEntropyParallel()._apply
    with pytest.raises(ValueError, match=r"device_mesh must have one dimension.*mesh\['tp'\]"):
        apply(nn.Linear(2, 2), mesh)

    class Scaled(nn.Linear):
        pass

    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore
    for module in (Scaled(2, 2), nn.Embedding(2, 2), LinearCrossEntropy(2, 2), patched):
        with pytest.raises(NotImplementedError, match=f"got {type(module).__name__}"):
            apply(module, mesh["tp"])
    head = nn.Linear(H, VOCAB)
    parallelize_module(head, mesh["dp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"^weight must be a plain tensor or a DTensor with Shard"):
        apply(head, mesh["tp"])
    made_head: Any = apply(nn.Linear(H, VOCAB), mesh["tp"])
    hidden = torch.randn(B, S, H)
    arguments: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"temperature": torch.ones(B, S)},
        {"token_weight": torch.ones(B, S)},
    ]
    for unused in arguments:
        with pytest.raises(ValueError, match=r"^token_weight and temperature need labels"):
            made_head(hidden, **unused)
    assert made_head(hidden, temperature=1.0).shape == (B, S, VOCAB)
    for layout, few in ((Shard(1), hidden[0]), (Shard(0), hidden[0, 0])):
        of_part: Any = LinearCrossEntropyParallel(input_layouts=layout)._apply(
            nn.Linear(H, VOCAB), mesh["tp"]
        )
        with pytest.raises(ValueError, match=r"^hidden must be .* under sequence_parallel=True"):
            of_part(few)


def test_options_are_checked_when_the_style_is_made():
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"soft_cap": 1.0}, TypeError, "Did you mean 'softcap'"),
        ({"sequence_parallel": True}, TypeError, "unexpected keyword argument 'sequence_parallel'"),
        ({"tp_group": None}, TypeError, "unexpected keyword argument 'tp_group'"),
        ({"label_smoothing": 2.0}, ValueError, "^label_smoothing must be"),
        ({"input_layouts": Shard(2)}, ValueError, "^input_layouts must be"),
        ({"input_layouts": Partial()}, ValueError, "^input_layouts must be"),
    ]
    for options, error, match in wrong:
        with pytest.raises(error, match=match):
            LinearCrossEntropyParallel(**options)
    style = LinearCrossEntropyParallel(input_layouts=Shard(1), softcap=3)
    assert repr(style) == "LinearCrossEntropyParallel(input_layouts=Shard(dim=1), softcap=3.0)"
