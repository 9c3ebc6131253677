"""The head of a trained model as a problem: in an order of the vocabulary, and widened.

T tokens, H hidden size of the model, k the factor by which it is widened, V rows here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce_dist import frequency_order, linear_cross_entropy_with_metrics
from flce_dist.launch.bench.config import RunSpec
from flce_dist.launch.bench.problem import CHUNK_BYTES, Problem
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.options import Impl
from flce_dist.testing.filtered_gradients import TILE_T
from flce_dist.vocab_order import TILE

Order = Literal["frequency", "tokenizer"]


@dataclass(frozen=True)
class TrainedHead:
    """What a trained model gives its output layer, and the layer, on the device."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V_all, H], in the tokenizer's order
    labels: Tensor  # [T] int64
    counts: Tensor  # [V_all] int64, how often each token occurs in the training text

    @classmethod
    def load(cls, path: Path, device: torch.device, T: int) -> "TrainedHead":
        """Return the first T tokens of a file.

        Raises:
            ConfigError: the file does not hold the four tensors in a dictionary.
        """
        try:
            head = cls(**torch.load(path, map_location=device, weights_only=True))
        except Exception as error:  # whatever a file of another kind leads to
            raise ConfigError(
                "head must be a file of torch.save with a dictionary of hidden, weight, labels and "
                f"counts, got {path}: {error}"
            ) from error
        return cls(head.hidden[:T], head.weight, head.labels[:T], head.counts)


def make_problem(
    head: TrainedHead, order: Order, widen: int, tp_group: dist.ProcessGroup | None
) -> Problem:
    """Return the whole vocabulary in an order; with a group, this rank's rows of it."""
    V_all = len(head.weight)
    token_of_row = torch.arange(V_all)
    if order == "frequency":
        token_of_row = frequency_order(head.counts.cpu()).token_of_row
    token_of_row = token_of_row.to(head.weight.device)
    weight, labels = head.weight[token_of_row], token_of_row.argsort()[head.labels]
    P, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    own = weight[rank * V_all // P : (rank + 1) * V_all // P]
    return Problem(_widened(head.hidden, widen), _widened(own, widen), labels, tp_group)


def _widened(x: Tensor, widen: int) -> Tensor:
    """Repeat features ``widen`` times, so that dot products stay."""
    return x.repeat(1, widen) / widen**0.5


def differentiated(
    problem: Problem, run: RunSpec
) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, float]]:
    """Return loss, both gradients and what a filtered run says of itself."""
    hidden = problem.hidden[problem.tokens_of(run)].detach().requires_grad_()
    weight = problem.weight.detach().requires_grad_()
    shares = {}
    if run.is_ours:
        result = linear_cross_entropy_with_metrics(
            hidden,
            weight,
            problem.labels,
            tp_group=problem.tp_group,
            sequence_parallel=run.sequence_parallel,
            schedule=run.schedule,
            filter_eps=run.filter_eps,
            impl=cast(Impl, run.impl),
        )
        loss = result.loss
        if run.filter_eps is not None:
            shares = {
                "kept_share": float(result.kept_share),
                "rank_one_mass": float(result.rank_one_mass),
            }
    else:
        loss = F.cross_entropy(hidden @ weight.T, problem.labels)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), (dhidden, dweight), shares


def dropped(problem: Problem, eps: float) -> tuple[Tensor, Tensor, float]:
    """Return dhidden and dweight in fp64 without tiles that are not kept, and the share kept.

    For one process.
    """
    hidden, weight, labels = problem.hidden.double(), problem.weight.double(), problem.labels
    dhidden, dweight, kept_blocks = torch.empty_like(hidden), torch.zeros_like(weight), []
    step = max(1, CHUNK_BYTES // (8 * TILE_T * len(weight))) * TILE_T
    for start in range(0, len(hidden), step):
        here = slice(start, start + step)
        dz = (hidden[here] @ weight.T).softmax(1)
        padding = (0, -dz.shape[1] % TILE, 0, -dz.shape[0] % TILE_T)
        tiles = F.pad(dz, padding).unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE_T))
        kept = tiles.amax((1, 3)) >= eps
        token = torch.arange(len(dz), device=dz.device)
        kept[token // TILE_T, labels[here] // TILE] = True
        dz[token, labels[here]] -= 1.0
        columns = kept.repeat_interleave(TILE, 1)[:, : len(weight)]
        dz *= columns.repeat_interleave(TILE_T, 0)[: len(dz)]
        dz /= len(hidden)
        dhidden[here] = dz @ weight
        dweight.addmm_(dz.T, hidden[here])
        kept_blocks.append(kept)
    return dhidden, dweight, torch.cat(kept_blocks).double().mean().item()
