"""The data of one shape and the truth about it, in fp64.

T = tokens, H = hidden size, V = whole vocabulary, P = ranks. Rank r holds rows
[r V / P, (r + 1) V / P) of the weight. The truth is computed in chunks of tokens, each rank on its
own rows and torch's collectives between them, so that it takes a few GiB at any T.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered import frequency_order
from flce_dist.launch.bench.config import RunSpec, ShapeSpec
from flce_dist.launch.bench.divergences import true_divergence
from flce_dist.launch.process_group import Group, own_tokens, rank_and_size, reduced
from flce_dist.launch.read import regular
from flce_dist.launch.yaml_config import ConfigError, require
from flce_dist.testing import relative_rms

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHUNK_BYTES = 1 << 30
"""Of fp64 logits held at a time; a few temporaries of that size come on top."""
HEAD_T = 8192
IGNORED = -100


@dataclass(frozen=True)
class Problem:
    """Inputs on this rank, the same numbers for every run of a shape."""

    hidden: Tensor  # [T, H], the same on all ranks
    weight: Tensor  # [V / P, H]
    labels: Tensor  # [T] int64 global ids, the same on all ranks
    tp_group: Group = None

    @property
    def rank(self) -> int:
        return rank_and_size(self.tp_group)[0]

    @property
    def counted(self) -> Tensor:
        """[T] bool: which tokens are not ignored."""
        return self.labels != IGNORED

    @property
    def shape(self) -> ShapeSpec:
        """Of a problem without a group."""
        names: dict[torch.dtype, Any] = {dtype: name for name, dtype in DTYPES.items()}
        T = len(self.labels)
        V, H = self.weight.shape
        return ShapeSpec(T, H, V, names[self.weight.dtype])

    @cached_property
    def teacher(self) -> tuple[Tensor, Tensor]:
        """Hidden states and this rank's rows of another model of the same size."""
        common: dict[str, Any] = {"dtype": self.weight.dtype, "device": self.weight.device}
        generator = torch.Generator(self.weight.device).manual_seed(1)
        hidden = torch.randn(self.hidden.shape, generator=generator, **common)
        generator.manual_seed(2 + self.rank)
        return hidden, torch.randn(self.weight.shape, generator=generator, **common).mul_(0.02)

    def tokens_of(self, run: RunSpec) -> slice:
        """This rank's tokens of hidden and of its gradient."""
        T = len(self.labels)
        return own_tokens(T, self.tp_group) if run.sequence_parallel else slice(T)

    def ids_of(self, run: RunSpec) -> Tensor:
        """Return ids [T, K] int64 of scores, the same on all ranks; the first is the label."""
        V = len(self.weight) * rank_and_size(self.tp_group)[1]
        x = torch.rand(len(self.labels), run.ids, generator=torch.Generator().manual_seed(0))
        ids = {"uniform": x * V, "zipf": (V + 1.0) ** x - 1, "one": x * 0}[run.spread].long()
        ids = ids.clamp_max(V - 1).to(self.labels.device)
        ids[:, 0] = self.labels
        return ids

    def low_rank_of(self, run: RunSpec) -> tuple[Tensor, Tensor]:
        """Return x of this rank's tokens [T, r], and b [V / P, r], which is trained.

        b is 0, as before the first step of LoRA, so that loss and dhidden are those without it. Its
        gradient is made and dropped.
        """
        tokens = len(self.hidden[self.tokens_of(run)])
        r = run.low_rank
        generator = torch.Generator(self.weight.device).manual_seed(3)
        like: dict[str, Any] = {"dtype": self.weight.dtype, "device": self.weight.device}
        x = torch.randn(tokens, r, generator=generator, **like)
        b = torch.zeros(len(self.weight), r, **like).requires_grad_()
        b.register_post_accumulate_grad_hook(lambda of_b: setattr(of_b, "grad", None))
        return x, b

    def column_of_label(self, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return [n] the label's column on this rank, or 0, and whether this rank has it."""
        rows = len(self.weight)
        column = self.labels[tokens] - self.rank * rows
        mine = (column >= 0) & (column < rows)
        return column.where(mine, 0), mine

    def shard(self, device: torch.device, tp_group: Group) -> "Problem":
        """Return this rank's part of a problem without a group, on ``device``."""
        rank, P = rank_and_size(tp_group)
        own = self.weight.chunk(P)[rank]
        return Problem(self.hidden.to(device), own.to(device), self.labels.to(device), tp_group)


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


def make_problem(shape: ShapeSpec, device: torch.device, seed: int, tp_group: Group) -> Problem:
    """Draw hidden ~ N(0, 1), weight ~ 0.02 N(0, 1) and uniform labels.

    Hidden states of flagged tokens point away from the label's row, whose logit is near -100.
    """
    rank, P = rank_and_size(tp_group)
    dtype = DTYPES[shape.dtype]
    generator = torch.Generator(device).manual_seed(seed)
    common: dict[str, Any] = {"device": device, "generator": generator}
    hidden = torch.randn(shape.T, shape.H, dtype=dtype, **common)
    labels = torch.randint(shape.V, (shape.T,), **common)
    generator.manual_seed(seed + 1 + rank)  # the shards differ, all else is the same
    weight = torch.randn(shape.V // P, shape.H, dtype=dtype, **common).mul_(0.02)
    problem = Problem(hidden, weight, labels, tp_group)
    if shape.flagged:
        t = torch.arange(shape.flagged, device=device) * shape.T // shape.flagged
        column, mine = problem.column_of_label(t)
        of_label = reduced(weight[column].float() * mine[:, None], tp_group)
        hidden[t] = (of_label * (-100 / (shape.H * 0.02**2))).to(dtype)
    if shape.contiguous:
        labels[: round(shape.T * (1 - shape.counted))] = IGNORED
    elif shape.counted < 1:
        generator.manual_seed(seed - 1)
        labels[torch.rand(shape.T, **common) >= shape.counted] = IGNORED
    return problem


def load_head(path: Path, widen: int) -> Problem:
    """Return the first HEAD_T tokens of a trained model's head, on the CPU; rows by frequency.

    The file is of ``torch.save`` and holds ``hidden``, ``labels``, ``weight`` in the tokenizer's
    order, and ``counts`` [V], how often each token occurs in the training text. Features are
    repeated ``widen`` times, so that H grows and logits stay. Another file raises ``ConfigError``.
    """
    try:
        with open(path, "rb", opener=regular):
            pass
        exported = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        hidden, weight, labels, counts = (
            exported[name] for name in ("hidden", "weight", "labels", "counts")
        )
        _check_head(hidden, weight, labels, counts)
        order = frequency_order(counts)
        labels = order.row_of_token[labels[:HEAD_T]]
        weight = weight[order.token_of_row]
        hidden, weight = (x.repeat(1, widen) / widen**0.5 for x in (hidden[:HEAD_T], weight))
        return Problem(hidden, weight, labels)
    except ConfigError as error:
        raise ConfigError(f"head: {path}: {error}") from error
    except Exception as error:  # whatever a file of another kind leads to
        raise ConfigError(
            "head must be a file of torch.save with a dictionary of hidden, weight, labels and "
            f"counts, got {path}: {error!r}"
        ) from error


def _check_head(hidden: Tensor, weight: Tensor, labels: Tensor, counts: Tensor) -> None:
    """Raise ``ConfigError`` unless the tensors are of one head that can be measured."""
    T = len(labels)
    V, H = weight.shape
    for name, x, shape in (("hidden", hidden, (T, H)), ("counts", counts, (V,))):
        got = tuple(x.shape)
        require(got == shape, f"{name} must be {shape} beside labels and weight, got {got}")
    dtypes = {hidden.dtype, weight.dtype}
    expected = f"one of {', '.join(map(str, DTYPES.values()))}"
    is_one = len(dtypes) == 1 and dtypes <= set(DTYPES.values())
    given = f"{hidden.dtype} and {weight.dtype}"
    require(is_one, f"hidden and weight must be of one dtype, {expected}, got {given}")
    require(labels.dim() == 1 and T > 0, f"labels must be [T], got {tuple(labels.shape)}")
    least, largest = int(labels.min()), int(labels.max())  # negative ones would count from the end
    is_id = 0 <= least and largest < V
    require(is_id, f"labels must be ids within [0, {V}), got {least} to {largest}")


@torch.no_grad()
def make_truth(problem: Problem, *, gradients: bool) -> Truth:
    """Compute the mean loss and, if asked for, its gradients."""
    T = len(problem.labels)
    rows = len(problem.weight)
    group = problem.tp_group
    n = max(1, int(problem.counted.sum()))
    weight = problem.weight.double()
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    dhidden = torch.empty_like(problem.hidden, dtype=torch.float64) if gradients else None
    dweight = torch.zeros_like(weight) if gradients else None
    chunk = max(1, CHUNK_BYTES // (8 * rows))
    for start in range(0, T, chunk):
        tokens = slice(start, min(start + chunk, T))
        hidden = problem.hidden[tokens].double()
        z = hidden @ weight.T
        column, mine = (x[:, None] for x in problem.column_of_label(tokens))
        label_logit = reduced(z.gather(1, column).where(mine, 0.0), group)
        top = reduced(z.amax(1, keepdim=True), group, dist.ReduceOp.MAX)
        z.sub_(top).exp_()
        total = reduced(z.sum(1, keepdim=True), group)
        counted = problem.counted[tokens, None]
        loss += ((top + total.log() - label_logit) * counted).sum()
        if dhidden is not None and dweight is not None:
            z.div_(total).scatter_add_(1, column, -mine.double()).mul_(counted)  # n dz
            dhidden[tokens] = reduced(z @ weight, group) / n
            dweight.addmm_(z.T, hidden, alpha=1 / n)
    return Truth(loss.item() / n, dhidden, dweight)


def relative_error(value: float, truth: float) -> float:
    """Return ``abs(value - truth) / abs(truth)``, also of a truth of 0; NaN stays NaN."""
    difference = abs(value - truth)
    if difference == 0.0:
        return 0.0
    return difference / abs(truth) if truth else difference * math.inf


def errors_of(
    run: RunSpec, loss: Tensor, gradients: list[Tensor], problem: Problem, truth: Truth
) -> Errors:
    """Compare one call's loss, and dhidden and dweight if there are any, with the truth."""
    is_divergence = run.divergence is not None
    if not run.has_loss or (is_divergence and rank_and_size(problem.tp_group)[1] > 1):
        return Errors()
    if run.divergence is not None:
        chunk = max(1, CHUNK_BYTES // (8 * len(problem.weight)))
        operands = problem.hidden, problem.weight, *problem.teacher
        needed = bool(gradients) and truth.dhidden is not None
        of_fp64 = true_divergence(operands, run.divergence, chunk=chunk, gradients=needed)
        truth = Truth(*of_fp64)
    loss_error = relative_error(loss.item(), truth.loss)
    if not gradients or truth.dhidden is None or truth.dweight is None:
        return Errors(loss_error)
    wanted = truth.dhidden[problem.tokens_of(run)], truth.dweight
    of_gradients = map(relative_rms, gradients, wanted)  # of hidden alone, with a frozen weight
    return Errors(loss_error, *of_gradients)
