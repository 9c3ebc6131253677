"""What TRL 1.16's trainers score tokens with, ``trl.kernels.ChunkedLogProbFunction``, as ours."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flce_dist.api import linear_cross_entropy_with_metrics

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class ChunkedLogProbFunction:
    """Takes the place of TRL's class of that name, of which only ``apply`` is called."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        temperature: float | Tensor, chunk_size: int | None = None,
        final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return logprobs and ``OUTPUTS``, [N] each; logprobs and entropy are differentiable.

        The logits are ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, that of
        all tokens, or [N]. weight [V, H] and bias are cast to the dtype of hidden [N, H], or all to
        autocast's, and may be sharded by FSDP2. A target of -100 is ignored. ``outputs`` left out
        are None; log_sum_sq_probs and mean_logits take a second pass. chunk_size is not used.
        """
        if not (isinstance(weight, DTensor) or torch.is_autocast_enabled(hidden.device.type)):
            weight = weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
        if bias is not None and logit_scale != 1.0:
            bias = bias * logit_scale
        scored = functools.partial(
            linear_cross_entropy_with_metrics, hidden, weight, targets, bias=bias,
            reduction="none", softcap=final_logit_softcapping, logit_scale=logit_scale,
        )  # fmt: skip
        out = scored(temperature=temperature)
        results = {"entropy": out.entropy, "is_top1": out.correct}
        if "log_sum_sq_probs" in outputs or "mean_logits" in outputs:
            with torch.no_grad():  # of logits twice as large
                twice = scored(temperature=temperature / 2, label_smoothing=1.0)
                results["log_sum_sq_probs"] = 2 * out.logprob - twice.logprob
                results["mean_logits"] = (twice.lse - twice.loss) / 2
        return -out.loss, *(results[x] if x in outputs else None for x in OUTPUTS)


class _OfParameters(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, DTensor) and not isinstance(x, nn.Parameter)

    def __getattr__(cls, name: str) -> Any:
        return getattr(DTensor, name)


class DTensorButNoParameter(metaclass=_OfParameters):
    """DTensor for TRL's fused head: a parameter is none of it, and so is not gathered.

    TRL would call full_tensor() of a weight that FSDP2 has sharded, which sums its gradient over
    data ranks.
    """


_theirs: list[tuple[Any, Any]] = []
"""What TRL's module had in place of ours, while it has ours."""


def use_linear_cross_entropy() -> None:
    """Let the fused LM head of all trainers of this process call ``ChunkedLogProbFunction``."""
    import trl
    from trl.trainer import utils

    if not hasattr(utils, "_ChunkedLogProbFunction"):
        raise NotImplementedError(f"TRL 1.16's fused LM head is not in TRL {trl.__version__}")
    if not _theirs:
        _theirs.append((utils._ChunkedLogProbFunction, utils.DTensor))
    utils._ChunkedLogProbFunction = ChunkedLogProbFunction
    utils.DTensor = DTensorButNoParameter


def restore() -> None:
    """Undo ``use_linear_cross_entropy``, where it was called."""
    if _theirs:
        from trl.trainer import utils

        utils._ChunkedLogProbFunction, utils.DTensor = _theirs.pop()
