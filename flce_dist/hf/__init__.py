"""Causal language models of Hugging Face's transformers compute their loss without logits."""

from flce_dist.hf.plug_in import restore, use_linear_cross_entropy

__all__ = ["restore", "use_linear_cross_entropy"]
