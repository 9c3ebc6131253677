"""megatron-core's language models (0.14 and newer) compute their loss without logits."""

from flce_dist.megatron.plug_in import use_linear_cross_entropy

__all__ = ["use_linear_cross_entropy"]
