"""Causal language models of Hugging Face's transformers compute their loss without logits."""

from flce_dist.hf.plug_in import restore, use_linear_cross_entropy
from flce_dist.hf.self_check import check_loss
from flce_dist.hf.stand_in import NO_LOGITS

__all__ = ["NO_LOGITS", "check_loss", "restore", "use_linear_cross_entropy"]
