"""megatron-core's language models (0.14 and newer) compute their loss without logits."""

from flce_dist.megatron.best_of_model import best_ids
from flce_dist.megatron.plug_in import use_linear_cross_entropy
from flce_dist.megatron.token_divergence import divergence
from flce_dist.megatron.token_scores import scores

__all__ = ["best_ids", "divergence", "scores", "use_linear_cross_entropy"]
