"""The kernels of best ids in Triton; ``eager.py`` has the same in PyTorch."""
# ruff: noqa: F401  # what is imported here is the interface

from flce_dist.kernels.best.label_logits import label_logits
from flce_dist.kernels.best.merge_groups import merged_lse, relative_to
from flce_dist.kernels.best.merge_ranks import merged_ids
from flce_dist.kernels.best.shard_pass import best_of_shard
