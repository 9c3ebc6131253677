"""The data of one shape and the truth about it, in fp64.

T = tokens, H = hidden size, V = whole vocabulary, P = ranks. Rank r holds rows
[r V / P, (r + 1) V / P) of the weight. The truth is computed in chunks of tokens, each rank on its
own rows and torch's collectives between them, so that it takes a few GiB at any T.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered import frequency_order
from flce_dist.launch.bench.config import RunSpec, ShapeSpec
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import relative_rms

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHUNK_BYTES = 1 << 30
"""Of fp64 logits held at a time; a few temporaries of that size come on top."""


@dataclass(frozen=True)
class Problem:
    """Inputs on this rank, the same numbers for every run of a shape."""

    hidden: Tensor  # [T, H], the same on all ranks
    weight: Tensor  # [V / P, H]
    labels: Tensor  # [T] int64 global ids, the same on all ranks
    tp_group: dist.ProcessGroup | None = None

    @property
    def P(self) -> int:
        return 1 if self.tp_group is None else self.tp_group.size()

    @property
    def rank(self) -> int:
        return 0 if self.tp_group is None else self.tp_group.rank()

    def tokens_of(self, run: RunSpec) -> slice:
        """This rank's tokens of hidden and of its gradient."""
        T = len(self.labels)
        if not run.sequence_parallel:
            return slice(T)
        return slice(self.rank * T // self.P, (self.rank + 1) * T // self.P)


@dataclass(frozen=True)
class Truth:
    """fp64 results; the gradients are whole dhidden [T, H] and this rank's dweight [V / P, H]."""

    loss: float
    dhidden: Tensor | None = None
    dweight: Tensor | None = None


@dataclass(frozen=True)
class Errors:
    """Relative errors of a run, the gradients' as RMS; None where nothing was compared."""

    loss: float | None = None
    dhidden: float | None = None
    dweight: float | None = None


def make_problem(
    shape: ShapeSpec, device: torch.device, seed: int, tp_group: dist.ProcessGroup | None
) -> Problem:
    """Draw hidden ~ N(0, 1), weight ~ 0.02 N(0, 1) and uniform labels.

    Hidden states of flagged tokens point away from the label's row, whose logit is near -100.
    """
    P, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    dtype, rows = DTYPES[shape.dtype], shape.V // P
    generator = torch.Generator(device).manual_seed(seed)
    common: dict[str, Any] = {"device": device, "generator": generator}
    hidden = torch.randn(shape.T, shape.H, dtype=dtype, **common)
    labels = torch.randint(shape.V, (shape.T,), **common)
    generator.manual_seed(seed + 1 + rank)  # the shards differ, all else is the same
    weight = torch.randn(rows, shape.H, dtype=dtype, **common).mul_(0.02)
    problem = Problem(hidden, weight, labels, tp_group)
    if shape.flagged:
        t = torch.arange(shape.flagged, device=device) * shape.T // shape.flagged
        column = labels[t] - rank * rows
        mine = (column >= 0) & (column < rows)
        of_label = _reduced(weight[column.where(mine, 0)].float() * mine[:, None], problem)
        hidden[t] = (of_label * (-100 / (shape.H * 0.02**2))).to(dtype)
    return problem


HEAD_T = 8192


@dataclass(frozen=True)
class TrainedHead:
    """What a trained model gives its output layer, and the layer; rows by frequency."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [T] int64

    @classmethod
    def load(cls, path: Path, widen: int) -> "TrainedHead":
        """Return the first HEAD_T tokens of a file, on the CPU.

        It is of ``torch.save`` and holds ``hidden``, ``labels``, ``weight`` in the tokenizer's
        order, and ``counts`` [V], how often each token occurs in the training text. Features are
        repeated ``widen`` times, so that H grows and logits stay.

        Raises:
            ConfigError: it is another file.
        """
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            order = frequency_order(found["counts"])
            hidden, weight = found["hidden"][:HEAD_T], found["weight"][order.token_of_row]
            labels = order.row_of_token[found["labels"][:HEAD_T]]
            hidden, weight = (x.repeat(1, widen) / widen**0.5 for x in (hidden, weight))
            return cls(hidden, weight, labels)
        except Exception as error:  # whatever a file of another kind leads to
            raise ConfigError(
                "head must be a file of torch.save with a dictionary of hidden, weight, labels and "
                f"counts, got {path}: {error!r}"
            ) from error

    @property
    def shape(self) -> ShapeSpec:
        (V, H), names = self.weight.shape, {dtype: name for name, dtype in DTYPES.items()}
        return ShapeSpec(len(self.labels), H, V, names[self.weight.dtype])  # type: ignore[arg-type]

    def problem(self, device: torch.device, tp_group: dist.ProcessGroup | None) -> Problem:
        P, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
        own = self.weight.chunk(P)[rank]
        return Problem(self.hidden.to(device), own.to(device), self.labels.to(device), tp_group)


@torch.no_grad()
def make_truth(problem: Problem, *, gradients: bool) -> Truth:
    """Compute the mean loss and, if asked for, its gradients."""
    T, rows = len(problem.labels), len(problem.weight)
    weight = problem.weight.double()
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    dhidden = torch.empty_like(problem.hidden, dtype=torch.float64) if gradients else None
    dweight = torch.zeros_like(weight) if gradients else None
    chunk = max(1, CHUNK_BYTES // (8 * rows))
    for start in range(0, T, chunk):
        tokens = slice(start, min(start + chunk, T))
        hidden = problem.hidden[tokens].double()
        z = hidden @ weight.T
        column = problem.labels[tokens, None] - problem.rank * rows
        mine = (column >= 0) & (column < rows)
        column = column.where(mine, 0)
        label_logit = _reduced(z.gather(1, column).where(mine, 0.0), problem)
        top = _reduced(z.amax(1, keepdim=True), problem, dist.ReduceOp.MAX)
        z.sub_(top).exp_()
        total = _reduced(z.sum(1, keepdim=True), problem)
        loss += (top + total.log() - label_logit).sum()
        if dhidden is not None and dweight is not None:
            z.div_(total).scatter_add_(1, column, -mine.double())  # now the logits' gradient, T dz
            dhidden[tokens] = _reduced(z @ weight, problem) / T
            dweight.addmm_(z.T, hidden, alpha=1 / T)
    return Truth(loss.item() / T, dhidden, dweight)


def errors_of(
    run: RunSpec, loss: Tensor, gradients: tuple[Tensor, Tensor] | None, problem: Problem,
    truth: Truth,
) -> Errors:  # fmt: skip
    """Compare one call's results with the truth."""
    loss_error = abs(loss.item() - truth.loss) / abs(truth.loss)
    if gradients is None or truth.dhidden is None or truth.dweight is None:
        return Errors(loss_error)
    dhidden, dweight = gradients
    return Errors(
        loss_error,
        relative_rms(dhidden, truth.dhidden[problem.tokens_of(run)]),
        relative_rms(dweight, truth.dweight),
    )


def _reduced(
    x: Tensor, problem: Problem, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    if problem.tp_group is not None:
        dist.all_reduce(x, op, group=problem.tp_group)
    return x
