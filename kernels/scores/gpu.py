"""The kernels of scores in Triton; ``eager.py`` has the same in PyTorch."""
# ruff: noqa: F401  # what is imported here is the interface

from flce_dist.kernels.scores.gathered import dhidden_of_ids, logits_at_ids
from flce_dist.kernels.scores.id_sums import dweight_of_ids
from flce_dist.kernels.scores.named_values import write_named
from flce_dist.kernels.scores.sets import set_scores
