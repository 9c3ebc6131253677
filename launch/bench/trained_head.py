"""The head of a trained model as a problem: in an order, widened, whole or one shard of it.

T tokens, H hidden size of the model, k the factor by which it is widened, V rows here.

One process can stand for one rank of several, with the log-sum-exp of the whole vocabulary. The
last row of the shard's most frequent tile, which every block of tokens keeps, becomes the *rest*:
its logit is the log-sum-exp of all rows elsewhere and of the one that it replaces. Labels elsewhere
become the rest's. Its logit needs three features, for the high, middle and low bits; the first
three features of the model have one copy less, scaled so that logits stay. So the shapes, the tiles
that are kept and the gradients of all other rows and features are those of a rank, whose
collectives are not timed.
"""

from dataclasses import dataclass, replace
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

BATCH_T = 8192
PARTS = 3  # of the rest's logit: 24 bits in bf16


@dataclass(frozen=True)
class Part:
    """The rows of a problem: all of them (split over ranks, if there are several), or a shard."""

    order: Literal["frequency", "tokenizer"] = "frequency"
    shards: int = 1
    shard: int = 0

    @property
    def name(self) -> str:
        rows = "" if self.shards == 1 else f", shard {self.shard} of {self.shards}"
        return f"{self.order} order{rows}"


@dataclass(frozen=True)
class TrainedHead:
    """What a training run exports, on the device; see ``launch/train/export.py``."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V_all, H], in the tokenizer's order
    labels: Tensor  # [T] int64
    counts: Tensor  # [V_all] int64

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "TrainedHead":
        try:
            content = torch.load(path, map_location=device, weights_only=True)
            return cls(**content)
        except Exception as error:  # whatever a file of another kind leads to
            raise ConfigError(f"head must be a file of export_head, got {path}: {error}") from error

    def batches(self, T: int = BATCH_T) -> list["TrainedHead"]:
        """Return batches of T tokens without the rest, or one batch if there are fewer."""
        T = min(T, len(self.labels))
        count = len(self.labels) // T
        cuts = [slice(i * T, (i + 1) * T) for i in range(count)]
        return [replace(self, hidden=self.hidden[cut], labels=self.labels[cut]) for cut in cuts]


@dataclass(frozen=True)
class PartProblem:
    """A problem, and which of its gradients' rows and columns are the model's."""

    problem: Problem
    rows: Tensor  # [V] bool
    columns: Tensor  # [k H] bool


def make_part(
    head: TrainedHead, part: Part, widen: int, tp_group: dist.ProcessGroup | None
) -> PartProblem:
    """Return the problem of a part; with a group, each rank's rows of the whole vocabulary."""
    V_all, device = len(head.weight), head.weight.device
    token_of_row = torch.arange(V_all)
    if part.order == "frequency":
        token_of_row = frequency_order(head.counts).token_of_row
    token_of_row = token_of_row.to(device)
    weight, labels = head.weight[token_of_row], token_of_row.argsort()[head.labels]
    if part.shards > 1:
        V = V_all // part.shards
        here = slice(part.shard * V, (part.shard + 1) * V)
        tiles = head.counts[token_of_row[here]].view(-1, TILE).sum(1)
        rest = here.start + int(tiles.argmax()) * TILE + TILE - 1
        return _shard(head.hidden, weight, labels, here, rest, widen)
    P, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    own = weight[rank * V_all // P : (rank + 1) * V_all // P]
    problem = Problem(_widened(head.hidden, widen), _widened(own, widen), labels, tp_group)
    rows, columns = (torch.ones(n, dtype=torch.bool, device=device) for n in own.shape)
    return PartProblem(problem, rows, columns.repeat(widen))


def _shard(
    hidden: Tensor, weight: Tensor, labels: Tensor, here: slice, rest: int, widen: int
) -> PartProblem:
    """Return the problem of the rows ``here``, with row ``rest`` in place of all others."""
    V, H, rest_here = here.stop - here.start, hidden.shape[1], rest - here.start
    is_here = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    is_here[here] = True
    is_here[rest] = False
    wide_hidden, wide_weight = (_widened(x, widen, freed=PARTS) for x in (hidden, weight[here]))
    slots = slice((widen - 1) * H, (widen - 1) * H + PARTS)
    wide_weight[rest_here] = 0.0
    wide_weight[rest_here, slots] = 1.0
    left = _lse_of(hidden, weight, ~is_here)
    for column in range(slots.start, slots.stop):
        wide_hidden[:, column] = left.to(hidden.dtype)
        left = left - wide_hidden[:, column].double()
    own = torch.where(is_here[labels], labels - here.start, rest_here)
    rows, columns = (torch.ones(n, dtype=torch.bool) for n in (V, widen * H))
    rows[rest_here], columns[slots] = False, False
    problem = Problem(wide_hidden, wide_weight, own)
    return PartProblem(problem, rows.to(weight.device), columns.to(weight.device))


def _widened(x: Tensor, widen: int, freed: int = 0) -> Tensor:
    """Repeat features ``widen`` times, so that dot products stay; ``freed`` last copies are 0."""
    H = x.shape[1]
    wide = (x.repeat(1, widen) / widen**0.5).view(-1, widen, H)
    if freed:
        wide[:, :, :freed] = x[:, None, :freed] / (widen - 1) ** 0.5
        wide[:, -1, :freed] = 0.0
    return wide.view(-1, widen * H)


def _lse_of(hidden: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """Return the log-sum-exp over some rows [T] in fp64."""
    weight = weight[rows].double()
    chunks = hidden.split(max(1, CHUNK_BYTES // (8 * len(weight))))
    return torch.cat([(chunk.double() @ weight.T).logsumexp(1) for chunk in chunks])


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
