"""The kernel interface in Triton; ``eager.py`` has the same functions in plain PyTorch."""
# ruff: noqa: F401  # what is imported here is the interface

from flce_dist.kernels.counted_gemm import counted_gemm
from flce_dist.kernels.ids.at_ids import logits_at_ids, write_at_ids
from flce_dist.kernels.ids.id_sums import dhidden_of_ids, dweight_of_ids
from flce_dist.kernels.ids.sets import set_gradient, set_scores
from flce_dist.kernels.ids.sorted_rows import sorted_ids
from flce_dist.kernels.logits.dlogits import dlogits
from flce_dist.kernels.logits.linear_stats import linear_stats
from flce_dist.kernels.logits.merge_stats import new_sums
from flce_dist.kernels.logits.rescue import rescue
from flce_dist.kernels.rows.reduce_loss import loss_norm, mean_loss, reduce_loss
from flce_dist.kernels.rows.scale import scale, scale_rows
from flce_dist.kernels.rows.token_gradient import row_gradient
from flce_dist.kernels.rows.token_loss import token_loss
