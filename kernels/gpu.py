"""The kernel interface in Triton; the same functions in plain torch are in ``eager.py``."""

from flce_dist.kernels.dlogits import dlogits
from flce_dist.kernels.label_logit import label_logit
from flce_dist.kernels.linear_stats import linear_stats, rescue
from flce_dist.kernels.scale_rows import scale_rows

__all__ = ["dlogits", "label_logit", "linear_stats", "rescue", "scale_rows"]
