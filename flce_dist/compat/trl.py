"""What TRL 1.16's trainers score tokens and compare models with, as ours.

``ChunkedLogProbFunction`` of ``trl.kernels``, and ``ChunkedDivergenceFunction``.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flce_dist.api import linear_cross_entropy_with_metrics
from flce_dist.arguments.fsdp import gathered
from flce_dist.arguments.options import Kind
from flce_dist.compat.stand_ins import StandIns
from flce_dist.divergence import linear_divergence_with_metrics

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class ChunkedLogProbFunction:
    """Takes the place of TRL's class of that name, of which only ``apply`` is called."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
        chunk_size: int | None = None,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Return logprobs and ``OUTPUTS``, [N] each; logprobs and entropy are differentiable.

        The logits are ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, that of
        all tokens, or [N]. weight [V, H] and bias are cast to the dtype of hidden [N, H], or all to
        autocast's, and may be sharded by FSDP2. A target of -100 is ignored. ``outputs`` left out
        are None; log_sum_sq_probs and mean_logits take a second pass. chunk_size is not used.
        """
        weight, bias = _cast(hidden, weight, bias, logit_scale)
        scored = functools.partial(
            linear_cross_entropy_with_metrics,
            hidden,
            weight,
            targets,
            bias=bias,
            reduction="none",
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
        )
        out = scored(temperature=temperature)
        results = {"entropy": out.entropy, "is_top1": out.correct}
        if "log_sum_sq_probs" in outputs or "mean_logits" in outputs:
            with torch.no_grad():  # of logits twice as large
                twice = scored(temperature=temperature / 2, label_smoothing=1.0)
                results["log_sum_sq_probs"] = twice.lse - 2 * out.lse  # also of a banned target
                results["mean_logits"] = (twice.lse - twice.loss) / 2
        return -out.loss, *(results[x] if x in outputs else None for x in OUTPUTS)


class ChunkedDivergenceFunction:
    """Takes the place of TRL's class of that name, of which only ``apply`` is called."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the divergence, differentiable, and the student's entropy, [N] each.

        beta 0 is the forward KL divergence, 1 the reverse one, and between them the generalised
        Jensen-Shannon divergence. Weights and biases are cast to the dtype of their hidden states,
        and may be sharded by FSDP2.
        """
        of_ends: dict[float, Kind] = {0.0: "forward_kl", 1.0: "reverse_kl"}
        kind = of_ends.get(float(beta), "jsd")
        own = _cast(hidden, weight, bias, logit_scale)
        theirs = _cast(teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale)
        outputs = linear_divergence_with_metrics(
            hidden,
            own[0],
            teacher_hidden,
            theirs[0],
            kind=kind,
            bias=own[1],
            teacher_bias=theirs[1],
            reduction="none",
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            teacher_logit_scale=teacher_logit_scale,
            teacher_softcap=teacher_softcap,
            beta=beta if kind == "jsd" else 0.5,
        )
        return outputs.loss, outputs.entropy


def _cast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias as ours takes them: TRL scales the bias, too.

    Those that FSDP2 has sharded are gathered first: what a cast or product returns is no parameter.
    """
    weight = gathered(weight, hidden, None)
    bias = gathered(bias, hidden, None)
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
    return weight, bias if bias is None or logit_scale == 1.0 else bias * logit_scale


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


_stand_ins = StandIns()


def use_linear_cross_entropy() -> None:
    """Let the fused LM head of all trainers of this process call ``ChunkedLogProbFunction``."""
    import trl
    from trl.trainer import utils

    if not hasattr(utils, "_ChunkedLogProbFunction"):
        raise NotImplementedError(f"TRL 1.16's fused LM head is not in TRL {trl.__version__}")
    _stand_ins.put(utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)
    _stand_ins.put(utils, "DTensor", DTensorButNoParameter)


def use_linear_divergence() -> None:
    """Let TRL's distillation trainer of this process call ``ChunkedDivergenceFunction``."""
    import trl
    from trl.trainer import distillation_trainer

    if not hasattr(distillation_trainer, "ChunkedDivergenceFunction"):
        raise NotImplementedError(f"TRL 1.16's divergence is not in TRL {trl.__version__}")
    _stand_ins.put(distillation_trainer, "ChunkedDivergenceFunction", ChunkedDivergenceFunction)


def restore() -> None:
    """Undo ``use_linear_cross_entropy`` and ``use_linear_divergence``, where they were called."""
    _stand_ins.restore()
