"""The head's input in a trained model as one file, which ``launch.bench.filtered`` reads.

T tokens, H hidden size, V_all vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.train.head import head_input
from flce_dist.launch.train.ranks import on_rank_0
from flce_dist.launch.write import replacing

if TYPE_CHECKING:
    from flce_dist.launch.train.trainer import Trainer

HEAD = "head.pt"


def export_head(trainer: "Trainer", tokens: int) -> None:
    """Write ``head.pt`` into the run's folder; collective.

    It holds ``hidden`` [T, H] and ``labels`` [T] int64 of the first ``tokens`` tokens of the
    validation text, ``weight`` [V_all, H] in the tokenizer's order, and ``counts`` [V_all] int64 of
    the training text.
    """
    group = trainer.groups.tensor
    layer: Any = trainer.model.output_layer
    hidden: list[Tensor] = []
    labels: list[Tensor] = []
    weight = layer.weight
    while sum(map(len, labels)) < tokens:
        given = head_input(trainer.model, *trainer.probe_batch(len(labels)))
        whole = _all_ranks(given.hidden, group) if layer.sequence_parallel else given.hidden
        hidden.append(whole.detach().transpose(0, 1).flatten(0, 1).cpu())
        labels.append(given.labels.flatten().cpu())
        weight = given.weight
    weight = _all_ranks(weight, group)
    rows = getattr(layer, "row_of_token", None)
    weight = weight[: trainer.corpus.vocab_size] if rows is None else weight[rows]

    def write() -> None:
        path = trainer.config.out_dir / HEAD
        content = {
            "hidden": torch.cat(hidden)[:tokens].clone(),
            "weight": weight.cpu().clone(),
            "labels": torch.cat(labels)[:tokens].clone(),
            "counts": trainer.counts,
        }
        size = sum(x.nbytes for x in content.values())
        with replacing(path, size) as scratch:
            torch.save(content, scratch)

    on_rank_0(write)


def _all_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' ``x`` along the first dimension."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts)
