"""The best ids of each token, the label's rank among all, and samples, without the logits."""

from flce_dist.best.api import BestIds, SampledIds, linear_sample, linear_top_k

__all__ = ["BestIds", "SampledIds", "linear_sample", "linear_top_k"]
