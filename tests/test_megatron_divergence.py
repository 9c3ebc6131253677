"""``flce_dist.megatron.divergence`` on forked gloo ranks, beside the logits of both models."""

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist import DivergenceWithMetrics
from flce_dist.divergence import teacher_shard
from flce_dist.megatron import divergence, use_linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.contract.models import VOCAB, Setting, batch, gpt, in_ddp, uneven
from tests.on_ranks import on_ranks


def models(at: Setting, **options: Any) -> tuple[Any, Any]:
    """A student and another teacher, both with Megatron's own output layer."""
    student, teacher = gpt(at, **options), gpt(at, **options)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.25)
    return student, teacher


@pytest.mark.parametrize(
    ("P", "at", "tied"),
    [
        (1, Setting(1, False), False),
        (2, Setting(2, False), True),
        (2, Setting(2, True), False),
    ],
    ids=str,
)
@on_ranks("P")
def test_divergence_is_that_of_megatrons_logits(group, P, at, tied):
    student, teacher = models(at, tied=tied)
    tokens, positions, labels = batch()
    args, labels = (tokens, positions, None), labels.clone()
    labels[:, 3] = -100
    log_p, log_q = (
        (model(*args, runtime_gather_output=True) / 0.8).log_softmax(-1)
        for model in (student, teacher)
    )
    expected = (log_p.exp() * (log_p - log_q.detach())).sum(-1).where(labels != -100, 0.0)
    uneven(expected).backward()
    truth = {name: p.grad.clone() for name, p in student.named_parameters()}

    student.zero_grad()
    model, teaching = use_linear_cross_entropy(student), use_linear_cross_entropy(teacher)
    found = divergence(model, teaching, *args, labels=labels, temperature=0.8, with_metrics=True)
    assert isinstance(found, DivergenceWithMetrics) and found.entropy.shape == labels.shape
    assert relative_rms(found.loss, expected) < 1e-5
    uneven(found.loss).backward()
    for name, p in model.named_parameters():
        assert relative_rms(p.grad, truth[name]) < 1e-4, name
    teacher.zero_grad()
    of_all: dict[str, Any] = {"labels": labels, "temperature": 0.8}
    mean = divergence(model, teaching, *args, reduction="mean", schedule="recompute", **of_all)
    counted = (labels != -100).sum()
    assert relative_rms(mean, expected.sum() / counted) < 1e-5
    other: dict[str, Any] = {"kind": "jsd", "beta": 0.3}
    jsd = divergence(model, teaching, *args, **of_all, **other)
    log_m = torch.log(0.3 * log_q.exp() + 0.7 * log_p.exp())
    of_jsd = 0.3 * log_q.exp() * (log_q - log_m) + 0.7 * log_p.exp() * (log_p - log_m)
    assert relative_rms(jsd, of_jsd.sum(-1).where(labels != -100, 0.0)) < 1e-4
    heats = torch.rand(labels.shape) + 0.5  # [b, s], as temperature
    per_token, of_both = (
        divergence(model, teaching, *args, labels=labels, temperature=heats, teacher_temperature=x)
        for x in (heats.clone(), None)
    )
    assert torch.equal(per_token, of_both)
    assert all(p.grad is None or not p.grad.any() for p in teaching.parameters())


@on_ranks(2)
def test_main_grad_and_a_teacher_cut_anew(group):
    student, teacher = models(Setting(2, True), bf16=True, gradient_accumulation_fusion=True)
    args = (*batch()[:2], None)
    model, teaching = use_linear_cross_entropy(student), use_linear_cross_entropy(teacher)
    wrapped = in_ddp(model)
    weight, rank = teaching.output_layer.weight, group.rank()
    rows = (rank * len(weight), (rank + 1) * len(weight))
    shard = teacher_shard(weight, rows, tp_group=group)
    found = divergence(wrapped, teaching, *args, teacher_weight=shard, kind="forward_kl")
    again = divergence(wrapped, teaching, *args, kind="forward_kl")
    assert torch.equal(found, again) and found.shape == args[0].shape
    uneven(found).backward()
    assert model.output_layer.weight.main_grad.count_nonzero()
    assert VOCAB >= len(weight)


@on_ranks(1)
def test_what_has_no_divergence(group):
    student, teacher = models(Setting(1, False))
    args = (*batch()[:2], None)
    model = use_linear_cross_entropy(student)
    with pytest.raises(ValueError, match="use_linear_cross_entropy was called with"):
        divergence(model, teacher, *args)
    teacher.post_process = False
    with pytest.raises(NotImplementedError, match="output layers of both models"):
        divergence(model, teacher, *args)
