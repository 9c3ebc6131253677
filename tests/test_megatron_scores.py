"""``flce_dist.megatron.scores`` on forked gloo ranks, beside log_softmax of Megatron's logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist import TokenScores
from flce_dist.megatron import scores, use_linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.contract.models import VOCAB, Setting, batch, gpt, in_ddp, packing_of, uneven
from tests.on_ranks import on_ranks

K = 3
TEMPERATURE = 0.7


def inputs(cp: int, packed: bool) -> tuple[list[Any], dict[str, Any], Tensor]:
    """Arguments of the model, and ids [b, s, K] with some padding."""
    tokens, positions, _ = batch(cp=cp)
    keywords = {}
    if packed:
        tokens, positions = tokens.reshape(1, -1), positions.reshape(1, -1)
        keywords["packed_seq_params"] = packing_of(tokens)
    ids = torch.randint(VOCAB, (*tokens.shape, K), generator=torch.Generator().manual_seed(3))
    ids[:, 1::3, 2], ids[:, 4] = -1, -1
    return [tokens, positions, None], keywords, ids


def gradients(model: Any, *heads: Tensor) -> dict[str, Any]:
    total = torch.stack([uneven(head) for head in heads]).sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def of_logits(model: Any, ids: Tensor, args: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Scores and gradients of an unfused model."""
    logits = model(*args, runtime_gather_output=True, **keywords) / TEMPERATURE
    log_p = logits.log_softmax(-1)
    has_ids = (ids >= 0).any(-1)
    logprob = log_p.gather(-1, ids.clamp_min(0)).where(ids >= 0, 0.0)
    entropy = -(log_p.exp() * log_p).sum(-1).where(has_ids, 0.0)
    lse = logits.logsumexp(-1).where(has_ids, 0.0)
    found = {"logprob": logprob, "entropy": entropy, "lse": lse}
    return {**found, **gradients(model, *found.values())}


def check(found: TokenScores, model: Any, truth: dict[str, Any]) -> None:
    ours = {name: getattr(found, name) for name in ("logprob", "entropy", "lse")}
    ours |= gradients(model, *ours.values())
    assert ours.keys() == truth.keys()
    for name, x in truth.items():
        assert (ours[name] is None) == (x is None), name
        if x is not None:
            assert ours[name].shape == x.shape
            assert relative_rms(ours[name].double(), x.double()) < 1e-5, name


@pytest.mark.parametrize(("P", "at", "cp", "packed", "tied"), [
    (1, Setting(1, False), 1, False, False),
    (2, Setting(2, False), 1, False, True),
    (2, Setting(2, True), 1, False, False),
    (2, Setting(2, True), 1, True, True),
    (4, Setting(2, True), 2, False, False),
    (2, Setting(1, False), 2, True, False),
], ids=str)  # fmt: skip
@on_ranks("P")
def test_scores_are_those_of_megatrons_logits(group, P, at, cp, packed, tied):
    plain = gpt(at, cp=cp, tied=tied)
    args, keywords, ids = inputs(cp, packed)
    truth = of_logits(plain, ids, args, keywords)
    model = use_linear_cross_entropy(gpt(at, cp=cp, tied=tied))
    found = scores(model, ids, *args, temperature=TEMPERATURE, with_entropy=True, **keywords)
    check(found, model, truth)


@pytest.mark.parametrize("over", ["vocabulary", "ids"])
@on_ranks(2)
def test_options(group, over):
    """CSR ids of packed sequences, a temperature of each token, softcap and padding of rows."""
    plain = gpt(Setting(2, True))
    args, keywords, ids = inputs(1, packed=True)
    ids.clamp_(max=VOCAB - 2)
    temperature = torch.linspace(0.5, 2, ids[..., 0].numel()).view(ids.shape[:2])
    flat, offsets = ids[ids >= 0], torch.nn.functional.pad((ids >= 0).sum(-1)[0].cumsum(0), (1, 0))
    options: dict[str, Any] = {"vocab_size": VOCAB - 1, "softcap": 5.0, "logit_scale": 0.8}
    given = {"over": over, "temperature": temperature, "with_entropy": True, **keywords}
    logits = 5 * (plain(*args, runtime_gather_output=True, **keywords) * 0.16).tanh()
    logits = logits[..., : VOCAB - 1] / temperature[..., None]
    if over == "ids":
        held = torch.zeros_like(logits, dtype=torch.bool)
        held.scatter_(-1, ids.where(ids >= 0, ids[..., :1].clamp_min(0)), True)
        logits = logits.where(held, -torch.inf)
    logprob = logits.log_softmax(-1).gather(-1, ids.clamp_min(0))
    model = use_linear_cross_entropy(gpt(Setting(2, True)), **options)
    padded = scores(model, ids, *args, **given)
    csr = scores(model, flat, *args, offsets=offsets, **given)
    assert torch.equal(padded.logprob[ids >= 0], csr.logprob)
    assert relative_rms(csr.logprob, logprob[ids >= 0]) < 1e-5
    assert padded.entropy is not None and torch.equal(padded.entropy, csr.entropy)


@on_ranks(2)
def test_a_wrapped_model_and_its_main_grad(group):
    """bf16, in DDP with fusion; what it returned before is returned after."""
    plain = gpt(Setting(2, True), bf16=True, gradient_accumulation_fusion=True)
    model = use_linear_cross_entropy(plain)
    args, _, ids = inputs(1, packed=False)
    wrapped = in_ddp(model)
    before = wrapped(*args)
    found = scores(wrapped, ids, *args)
    assert type(found) is TokenScores and found.entropy is None
    weight = model.output_layer.weight
    uneven(found.logprob).backward()
    assert weight.main_grad.count_nonzero()
    found = scores(wrapped, ids, *args, schedule="cached", tp_invariant=False)
    logits = wrapped(*args)
    assert torch.equal(logits, before)


@on_ranks(1)
def test_what_has_no_scores(group):
    plain = gpt(Setting(1, False))
    args, _, ids = inputs(1, packed=False)
    with pytest.raises(ValueError, match="that use_linear_cross_entropy was called with"):
        scores(plain, ids, *args)
    model = use_linear_cross_entropy(plain)
    with pytest.raises(NotImplementedError, match="without labels"):
        scores(model, ids, *args, labels=batch()[2])
    with pytest.raises(ValueError, match="offsets need a batch of one row, got 2"):
        scores(model, ids.flatten(), *args, offsets=torch.arange(33) * K)
    with pytest.raises(ValueError, match=r"ids must be within \[0, 96\)"):
        scores(model, ids + VOCAB, *args)
    assert type(model(*args)) is Tensor
    model.output_layer.register_forward_hook(lambda *given: None)
    with pytest.raises(NotImplementedError, match="hooks of others"):
        scores(model, ids, *args)
    stage = torch.nn.Linear(2, 2)
    stage.post_process = False  # type: ignore[assignment]
    assert scores(stage, ids, torch.zeros(2)).shape == (2,)
