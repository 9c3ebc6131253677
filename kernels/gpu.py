"""The kernel interface in Triton; ``eager.py`` has the same functions in plain PyTorch."""

from flce_dist.kernels.dlogits import dlogits
from flce_dist.kernels.label_logit import label_logit
from flce_dist.kernels.label_value import write_label_value
from flce_dist.kernels.linear_stats import linear_stats
from flce_dist.kernels.merge_stats import new_sums
from flce_dist.kernels.reduce_loss import loss_norm, reduce_loss
from flce_dist.kernels.rescue import rescue
from flce_dist.kernels.scale import scale
from flce_dist.kernels.scale_rows import scale_rows
from flce_dist.kernels.token_gradient import row_gradient
from flce_dist.kernels.token_loss import token_loss

__all__ = [
    "dlogits",
    "label_logit",
    "linear_stats",
    "loss_norm",
    "new_sums",
    "reduce_loss",
    "rescue",
    "row_gradient",
    "scale",
    "scale_rows",
    "token_loss",
    "write_label_value",
]
