"""The kernels of a divergence in Triton; ``eager.py`` here has the same in plain PyTorch."""
# ruff: noqa: F401  # what is imported here is the interface

from flce_dist.kernels.divergence.pair_dlogits import pair_dlogits
from flce_dist.kernels.divergence.pair_logits import pair_logits
from flce_dist.kernels.divergence.pair_stats import stats_of_totals
from flce_dist.kernels.divergence.pair_sums import pair_sums
