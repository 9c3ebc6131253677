"""The plug-in on forked gloo ranks, beside what it shares with Megatron (test_contract.py).

megatron-core keeps its process groups in globals of the process, so threads would not do.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from flce_dist.launch.train.config import ParallelConfig
from flce_dist.launch.train.model import build_model, token_losses
from flce_dist.megatron import fused_layer
from flce_dist.testing import RankPool
from tests.megatron_models import (
    CONFIG,
    VOCAB,
    as_megatron_has_it,
    batch,
    build,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def rank_largest(group: Any, sp: bool) -> None:
    fused_layer._WINDOW = 10  # several windows, the last one short
    model, _ = build(group.size(), sp, tied=False)
    layer = model.output_layer
    hidden = torch.randn(12 // (group.size() if sp else 1), 3, CONFIG.model.hidden_size)
    logits, gathered = layer(hidden)[0], layer(hidden, runtime_gather_output=True)[0]
    assert gathered.shape[-1] == VOCAB
    layer.is_lazy = True
    lazy, _ = layer(hidden)
    value, place = (lazy * -2.0).max(dim=-1)
    torch.testing.assert_close(value, -2 * logits.min(-1).values)
    assert torch.equal(place, logits.argmin(-1))
    assert lazy.size(-1) == logits.shape[-1]
    lazy_gathered, _ = layer(hidden, runtime_gather_output=True)
    assert torch.equal(torch.argmax(lazy_gathered, dim=-1), gathered.argmax(-1))
    with pytest.raises(TypeError):
        torch.exp(lazy)
    with pytest.raises(AttributeError, match="a forward hook on the output layer"):
        lazy.float()


@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
def test_the_largest_logit_without_logits(pools: dict[int, RankPool], tp: int, sp: bool) -> None:
    pools[tp].run(rank_largest, sp)


def rank_padded(group: Any) -> tuple[Tensor, Tensor]:
    # 95 entries on two ranks: 48 rows each, the last one is padding.
    model, _ = build(2, sp=True, tied=False, vocab=VOCAB - 1)
    tokens, labels = (ids.clamp(max=VOCAB - 2) for ids in batch())
    before = token_losses(model, tokens, labels)
    with torch.no_grad():
        model.output_layer.weight[VOCAB // 2 - 1 if group.rank() == 1 else VOCAB :] = 1e4
    return before.detach(), token_losses(model, tokens, labels).detach()


def test_padding_of_the_vocabulary_takes_no_part(pools: dict[int, RankPool]) -> None:
    for before, after in pools[2].run(rank_padded):
        assert torch.equal(before, after)


def rank_two_models(group: Any) -> None:
    model, _ = build(1, sp=False, tied=False)
    single = ParallelConfig(tensor=1, sequence_parallel=False)
    untied = replace(CONFIG.model, tie_embeddings=False)
    config = replace(CONFIG, model=untied, parallel=single)
    other: Any = build_model(config, VOCAB, torch.device("cpu"))
    names = sorted(model.state_dict())
    with torch.no_grad():
        other.output_layer.weight.zero_()
    uniform = token_losses(other, *batch())
    torch.testing.assert_close(uniform, torch.full_like(uniform, VOCAB).log())
    assert not torch.allclose(uniform, token_losses(model, *batch()))
    assert names == sorted(as_megatron_has_it(model).state_dict())


def test_models_do_not_mix_and_parameter_names_stay(pools: dict[int, RankPool]) -> None:
    pools[1].run(rank_two_models)
