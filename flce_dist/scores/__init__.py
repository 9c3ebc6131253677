"""Log-probabilities at ids: of a sampled token, of a teacher's top K, of a sampler's candidates."""

from flce_dist.scores.api import TokenScores, linear_logprob

__all__ = ["TokenScores", "linear_logprob"]
