"""What the caller asked for, as one frozen object that travels from api to kernels."""

from dataclasses import dataclass
from typing import Literal

Reduction = Literal["none", "sum", "mean"]
Schedule = Literal["auto", "recompute", "cached", "in_forward"]
Impl = Literal["triton", "eager"]


@dataclass(frozen=True)
class LossOptions:
    """Keywords of ``linear_cross_entropy`` that change what is computed or how.

    With logits ``z = softcap(logit_scale * (h . w) + b)``::

        loss = lse - (1 - label_smoothing) * z_y - label_smoothing / V_all * sum_v z_v
               + z_loss_weight * lse^2
    """

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    sequence_parallel: bool = False
    reduce_dhidden: bool = True
    reduce_in_fp32: bool = False
    tp_invariant: bool = False
    schedule: Schedule = "auto"
    max_logits_bytes: int | None = None
    with_metrics: bool = False

    @property
    def smoothing_needs_logits(self) -> bool:
        """Whether the gradient of the smoothing term depends on each logit.

        Without a softcap that gradient is the same number for every column, a rank-1 term of
        ``dlogits``; with one it is that number times ``softcap'(z)`` and needs the logits again.
        """
        return self.label_smoothing != 0.0 and self.softcap is not None
