"""The kernels of filtered gradients in Triton; ``eager.py`` has the same in PyTorch."""
# ruff: noqa: F401  # what is imported here is the interface

from flce_dist.kernels.filtered.dlogits import kept_dlogits, new_kept_buffer
from flce_dist.kernels.filtered.gemms import add_kept_dbias, add_kept_dhidden, kept_dweight
from flce_dist.kernels.filtered.sample import profile_sample
from flce_dist.kernels.filtered.stats import kept_tiles, new_tile_stats, rank_one, tile_profile
from flce_dist.kernels.filtered.tile_lists import tile_lists
