"""Divergences from a teacher as the benchmark runs them: ours, and those of other libraries.

An adapter is ``load(kind) -> loss_of(hidden, weight, teacher_hidden, teacher_weight)``, which
returns the mean over tokens. It imports what it needs when called. T = tokens, V = vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flce_dist.arguments.options import Kind
from flce_dist.launch.bench.peers import Skipped, require_one_rank
from flce_dist.reference import reference_linear_divergence

KINDS: tuple[str, ...] = get_args(Kind)
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _with_logits(kind: str) -> Divergence:
    """Logits by GEMMs in the operands' dtype, all else in fp32, by autograd."""

    def loss_of(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> Tensor:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        with torch.no_grad():
            log_q = F.linear(teacher_hidden, teacher_weight).float().log_softmax(-1)
        p = log_p.exp()
        q = log_q.exp()
        if kind == "tv":
            return (p - q).clamp_min(0.0).sum(-1).mean()
        if kind != "jsd":
            first, second = (log_q, log_p) if kind == "forward_kl" else (log_p, log_q)
            return (first.exp() * (first - second)).sum(-1).mean()
        log_m = ((p + q) / 2).log()
        return ((q * (log_q - log_m) + p * (log_p - log_m)) / 2).sum(-1).mean()

    return loss_of


def _trl(kind: str) -> Divergence:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    beta = _beta("TRL", kind)

    def loss_of(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
    ) -> Tensor:
        operands = hidden, weight, None, teacher_hidden, teacher_weight, None
        return ChunkedDivergenceFunction.apply(*operands, beta)[0].mean()

    return loss_of


def _liger(kind: str) -> Divergence:
    from liger_kernel.transformers.fused_linear_jsd import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        LigerFusedLinearJSD,
    )

    divergence = LigerFusedLinearJSD(jsd_beta=_beta("Liger", kind))
    return lambda *operands: divergence(*operands, shift_labels=None)


def _beta(library: str, kind: str) -> float:
    if kind not in BETAS:
        raise Skipped(f"{library} has no divergence {kind}")
    return BETAS[kind]


class DivergencePeer(NamedTuple):
    """On one rank; ``package`` is the distribution whose version belongs to a result."""

    load: Callable[[str], Divergence]
    package: str | None = None


DIVERGENCES: dict[str, DivergencePeer] = {
    "divergence_with_logits": DivergencePeer(_with_logits),
    "trl_divergence": DivergencePeer(_trl, "trl"),
    "liger_divergence": DivergencePeer(_liger, "liger-kernel"),
}


def load_divergence(name: str, kind: str, tp_group: dist.ProcessGroup | None) -> Divergence:
    """Return a peer's function; raise ``Skipped`` if it cannot run here, or has no such one."""
    peer = DIVERGENCES[name]
    require_one_rank(tp_group)
    try:
        return peer.load(kind)
    except ModuleNotFoundError as error:
        raise Skipped(f"{peer.package or name} is not installed: {error}") from error


def true_divergence(
    operands: tuple[Tensor, Tensor, Tensor, Tensor], kind: str, *, chunk: int, gradients: bool
) -> tuple[float, Tensor | None, Tensor | None]:
    """Return the mean over tokens in fp64 and, if asked for, both gradients; in chunks."""
    hidden, weight, teacher_hidden, teacher_weight = (x.detach() for x in operands)
    own = weight.double().requires_grad_(gradients)
    theirs = teacher_weight.double()
    T = len(hidden)
    total = 0.0
    parts = []
    for start in range(0, T, chunk):
        here = slice(start, start + chunk)
        x = hidden[here].double().requires_grad_(gradients)
        of_teacher = teacher_hidden[here].double()
        loss, *_ = reference_linear_divergence(
            x, own, of_teacher, theirs, kind=kind, reduction="sum"
        )
        loss = loss / T
        total += loss.item()
        if gradients:
            loss.backward()
            parts.append(x.grad)
    if not gradients:
        return total, None, None
    return total, torch.cat([x for x in parts if x is not None]), own.grad
