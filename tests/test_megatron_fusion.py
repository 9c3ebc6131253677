"""gradient_accumulation_fusion against megatron-core's own layer, under its DDP, on gloo ranks.

Megatron's CUDA extension is replaced by PyTorch (``fuse``); all else on both sides is its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist.launch.train.model import token_losses
from flce_dist.testing import RankPool, relative_rms
from tests.megatron_models import (
    CONFIG,
    batch,
    build,
    build_with_mtp,
    fuse,
    uneven,
    with_both,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MICROBATCHES = 3
BUDGET = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # bf16: Megatron rounds its logits


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


def accumulated(model: Any, in_fp32: bool = True) -> dict[str, Tensor]:
    """main_grad of every parameter after some microbatches under Megatron's DDP.

    In the hook of DDP's own, after which it takes the dummy gradient away, all flags are seen.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32, use_distributed_optimizer=False
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    wrapped.zero_grad_buffer()
    for step in range(MICROBATCHES):
        uneven(token_losses(wrapped, *batch(step))).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
        found[name] = parameter.main_grad.clone()
        found[f"{name} added"] = torch.tensor(parameter.grad_added_to_main_grad)
    return found


def rank_ddp(group: Any, sp: bool, tied: bool, dtype: torch.dtype, in_fp32: bool) -> Any:
    model = fuse(build(group.size(), sp, tied)[0]).to(dtype)
    model.config.params_dtype = dtype
    return with_both(model, lambda model: accumulated(model, in_fp32))


def assert_same_main_grads(ours: Any, theirs: Any, budget: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        if expected.dtype == torch.bool:
            assert ours[name] == expected, name
        else:
            assert expected.norm() > 0, name
            assert relative_rms(ours[name], expected) < budget, name


@pytest.mark.parametrize(
    "tp, sp, tied, dtype, in_fp32",
    [
        (1, False, False, torch.float32, True),
        (1, False, True, torch.bfloat16, True),
        (2, False, True, torch.float32, True),
        (2, True, False, torch.float32, True),
        (2, True, False, torch.bfloat16, True),
        (2, True, True, torch.bfloat16, False),
        (2, False, False, torch.bfloat16, False),
    ],
    ids=str,
)
def test_main_grads_and_flags_are_megatrons(pools, tp, sp, tied, dtype, in_fp32):
    head = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    for ours, theirs in pools[tp].run(rank_ddp, sp, tied, dtype, in_fp32):
        assert ours[f"{head} added"]
        assert ours[head].dtype == (torch.float32 if in_fp32 else dtype)
        assert_same_main_grads(ours, theirs, BUDGET[dtype])


def rank_mtp(group: Any, sp: bool) -> Any:
    return with_both(fuse(build_with_mtp(sp, depths=2)), accumulated)


@pytest.mark.parametrize("sp", [False, True])
def test_multi_token_prediction_uses_the_weight_several_times(pools, sp):
    for ours, theirs in pools[2].run(rank_mtp, sp):
        assert_same_main_grads(ours, theirs, 1e-5)


def prepared(weight: Any, flag: bool = True) -> Any:
    """Attributes that DDP would set."""
    weight.main_grad = torch.ones(weight.shape)
    weight.grad = None
    if flag:
        weight.grad_added_to_main_grad = False
    elif hasattr(weight, "grad_added_to_main_grad"):
        del weight.grad_added_to_main_grad
    return weight


def rank_dummies(group: Any) -> None:
    """What autograd gets in place of dweight, and that main_grad is captured in forward."""
    model = fuse(build(2, sp=True, tied=False)[0], head_only=True).bfloat16()

    def run(model: Any) -> list[Any]:
        weight, seen = prepared(model.output_layer.weight), []
        for flag, zero_out in ((True, True), (True, False), (False, False)):
            prepared(weight, flag).zero_out_wgrad = zero_out
            loss = uneven(token_losses(model, *batch()))
            captured, weight.main_grad = weight.main_grad, torch.full(weight.shape, 7.0)
            loss.backward()
            assert weight.main_grad is captured
            grad = weight.grad
            seen.append(
                hasattr(weight, "grad_added_to_main_grad") and weight.grad_added_to_main_grad
            )
            seen.append(None if grad is None else (grad.dtype, grad.shape, grad.is_contiguous()))
            assert not zero_out or not grad.any()
        return seen

    ours, theirs = with_both(model, run)
    assert ours == theirs


def test_dummies_and_capture_are_megatrons(pools):
    pools[2].run(rank_dummies)


def rank_frozen(group: Any) -> None:
    model = fuse(build(2, sp=True, tied=False)[0], head_only=True)
    weight = prepared(model.output_layer.weight)
    hidden = torch.randn(6, 3, CONFIG.model.hidden_size, requires_grad=True)
    labels = batch()[1].T

    def backward(weight: Any) -> None:
        hidden.grad = None
        model.output_layer.token_loss(hidden, weight, labels).sum().backward()
        assert hidden.grad is not None and hidden.grad.any()

    backward(weight.detach())
    weight.requires_grad_(False)
    backward(weight)
    assert (weight.main_grad == 1).all() and weight.grad is None
    assert weight.grad_added_to_main_grad is False
    weight.requires_grad_(True)
    backward(weight)
    assert weight.grad_added_to_main_grad is True and not (weight.main_grad == 1).any()


def test_a_frozen_or_detached_weight_leaves_main_grad_alone(pools):
    pools[2].run(rank_frozen)


def rank_fsdp(group: Any) -> None:
    """A weight with the attributes of Megatron-FSDP; its buffer holds garbage until backward."""
    model = fuse(build(2, sp=False, tied=True)[0], head_only=True)
    embedding: Any = prepared(model.embedding.word_embeddings.weight)
    embedding.__fsdp_param__ = True
    with pytest.raises(NotImplementedError, match="Megatron-FSDP and tied embeddings"):
        token_losses(model, *batch())

    model = fuse(build(2, sp=False, tied=False)[0], head_only=True)
    weight: Any = prepared(model.output_layer.weight)
    del weight.main_grad
    made = torch.full(weight.shape, float("nan"))
    weight.__fsdp_param__, weight.get_main_grad = True, lambda: made

    def run(model: Any) -> Tensor:
        uneven(token_losses(model, *batch())).backward()
        assert weight.main_grad is made
        return made.clone()

    ours, theirs = with_both(model, run)
    assert relative_rms(ours, theirs) < 1e-5


def test_megatron_fsdp(pools):
    pools[2].run(rank_fsdp)


def rank_mistaken(group: Any, mistake: str) -> Any:
    """The op with a mistake; in the ranks' own processes, so it is undone there."""
    from flce_dist.op.main_grad import MainGrad

    opened, closed = MainGrad.opened, MainGrad.closed

    def dropped(self: MainGrad) -> tuple[Tensor, bool]:
        main_grad, adds = opened(self)
        return torch.zeros_like(main_grad), adds

    def overwritten(self: MainGrad) -> tuple[Tensor, bool]:
        return opened(self)[0], False

    def returned_too(self: MainGrad) -> Tensor | None:
        self.weight.grad_added_to_main_grad = False
        return opened(self)[0].clone()

    def unflagged(self: MainGrad) -> Tensor | None:
        result = closed(self)
        self.weight.grad_added_to_main_grad = False
        return result

    wrong: dict[str, tuple[str, Callable[..., Any]]] = {
        "dropped": ("opened", dropped),
        "overwritten": ("opened", overwritten),
        "added twice": ("closed", returned_too),
        "not flagged": ("closed", unflagged),
    }
    name, function = wrong[mistake]
    setattr(MainGrad, name, function)
    try:
        return rank_ddp(group, sp=True, tied=False, dtype=torch.float32, in_fp32=True)
    finally:
        MainGrad.opened, MainGrad.closed = opened, closed  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", ["dropped", "overwritten", "added twice", "not flagged"])
def test_a_mistake_shows(pools, mistake):
    for ours, theirs in pools[2].run(rank_mistaken, mistake):
        with pytest.raises(AssertionError, match=r"output_layer\.weight"):
            assert_same_main_grads(ours, theirs, 1e-5)
