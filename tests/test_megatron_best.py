"""``flce_dist.megatron.best_ids`` on forked gloo ranks, beside a sort of Megatron's logits."""

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist import BestIds
from flce_dist.megatron import best_ids, use_linear_cross_entropy
from tests.best_problem import close
from tests.contract.models import VOCAB, Setting, batch, gpt
from tests.on_ranks import on_ranks

K = 5


@pytest.mark.parametrize(("P", "at", "tied"), [
    (1, Setting(1, False), False), (2, Setting(2, False), True), (2, Setting(2, True), False),
], ids=str)  # fmt: skip
@on_ranks("P")
def test_best_ids_are_those_of_megatrons_logits(group, P, at, tied):
    """Each token's, its label's rank, and so the accuracy, where ranks share the vocabulary."""
    plain = gpt(at, tied=tied)
    tokens, positions, labels = batch()
    labels[0, :3] = -100
    with torch.no_grad():
        logits = plain(tokens, positions, None, runtime_gather_output=True)
        model = use_linear_cross_entropy(gpt(at, tied=tied), vocab_size=VOCAB - 1)
        found = best_ids(model, tokens, positions, None, k=K, labels=labels)
    logits = logits[..., : VOCAB - 1]
    in_order = logits.sort(dim=-1, descending=True, stable=True)
    counted = labels != -100
    assert type(found) is BestIds and found.ids is not None and found.logprob is not None
    assert torch.equal(found.ids[counted], in_order.indices[counted][:, :K])
    assert (found.ids[~counted] == -1).all()
    close(found.logprob[counted], logits.log_softmax(-1).sort(descending=True)[0][counted][:, :K])
    rank = (in_order.indices == labels[..., None]).int().argmax(-1)
    assert found.label_rank is not None
    assert torch.equal(found.label_rank, rank.where(counted, -1))
    right = logits.argmax(-1) == labels
    assert torch.equal(found.label_rank == 0, right & counted)


@on_ranks(1)
def test_what_has_no_best_ids(group):
    plain = gpt(Setting(1, False))
    tokens, positions, _ = batch()
    with torch.no_grad(), pytest.raises(ValueError, match="that use_linear_cross_entropy was"):
        best_ids(plain, tokens, positions, None, k=2)
    model = use_linear_cross_entropy(plain)
    with pytest.raises(NotImplementedError, match="linear_top_k has no gradients"):
        best_ids(model, tokens, positions, None, k=2)
    assert model.output_layer.question is None and model.output_layer.scoring is None
