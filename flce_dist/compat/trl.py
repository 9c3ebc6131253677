"""What TRL 1.16's trainers score tokens and compare models with, as ours.

``ChunkedLogProbFunction`` of ``trl.kernels``, and ``ChunkedDivergenceFunction``.
"""

import functools
from typing import Any, NamedTuple

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
        weight, bias = _cast(hidden, weight, bias)
        logits = _Logits.of(bias, logit_scale, final_logit_softcapping, temperature)
        scored = functools.partial(
            linear_cross_entropy_with_metrics,
            hidden,
            weight,
            targets,
            bias=logits.bias,
            reduction="none",
            softcap=logits.softcap,
            logit_scale=logits.scale,
        )
        out = scored(temperature=logits.temperature)
        results = {"entropy": out.entropy, "is_top1": out.correct}
        if "log_sum_sq_probs" in outputs or "mean_logits" in outputs:
            with torch.no_grad():  # of logits twice as large
                twice = scored(temperature=logits.temperature / 2, label_smoothing=1.0)
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
        weight, bias = _cast(hidden, weight, bias)
        teacher_weight, teacher_bias = _cast(teacher_hidden, teacher_weight, teacher_bias)
        own = _Logits.of(bias, logit_scale, softcap, temperature)
        theirs = _Logits.of(teacher_bias, teacher_logit_scale, teacher_softcap, temperature)
        outputs = linear_divergence_with_metrics(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            kind=kind,
            bias=own.bias,
            teacher_bias=theirs.bias,
            reduction="none",
            temperature=own.temperature,
            teacher_temperature=theirs.temperature,
            logit_scale=own.scale,
            softcap=own.softcap,
            teacher_logit_scale=theirs.scale,
            teacher_softcap=theirs.softcap,
            beta=beta if kind == "jsd" else 0.5,
        )
        return outputs.loss, outputs.entropy


class _Logits(NamedTuple):
    """``softcap(scale * h . w + bias) / temperature``, as ours has them."""

    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float | Tensor

    @classmethod
    def of(
        cls,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: float | Tensor,
    ) -> "_Logits":
        """Return those of TRL, which scales the bias, too.

        That would round it in 16 bits. A positive scale divides softcap and temperature instead.
        """
        if bias is None or scale == 1.0:
            return cls(bias, scale, softcap, temperature)
        if scale > 0.0:
            softcap = None if softcap is None else softcap / scale
            return cls(bias, 1.0, softcap, temperature / scale)
        return cls(bias * scale, scale, softcap, temperature)


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in hidden's dtype, but for autocast, which casts them itself.

    Those that FSDP2 has sharded are gathered first: what a cast returns is no parameter.
    """
    weight = gathered(weight, hidden, None)
    bias = gathered(bias, hidden, None)
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
    return weight, bias


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
