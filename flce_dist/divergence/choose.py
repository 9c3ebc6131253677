"""Which schedule a divergence takes, with which sizes: a function of facts that ranks share.

T = tokens of the group, V = rows of the largest even shard.
"""

import functools
import math

import torch

from flce_dist.divergence import schedule as schedules
from flce_dist.divergence.pair import Teacher
from flce_dist.kernels.divergence.formulas import Measure
from flce_dist.kernels.grid import PLANNED

LOGITS_BYTES = 5 << 28
"""Budget where the caller names none: 1.25 GiB."""

_MOST_CHUNKS = 8  # of a group
_WAVES_PER_ROW = 4e-5  # that adding to one row of dweight once more takes, by memory traffic
_KEPT_TOKENS = 16384  # tokens up to which auto, given no budget, keeps D
_MOST_ROUNDED = 8  # groups up to which a dweight in bf16 is rounded with each of them


def chosen_schedule(
    measure: Measure,
    teacher: Teacher,
    *,
    T: int,
    V: int,
    dtype: torch.dtype,
    asked: str,
    is_reduced: bool,
    needs_gradient: bool,
    max_logits_bytes: int | None,
) -> schedules.Divergence:
    """Return the schedule; ``max_logits_bytes`` bounds logits and D, beyond one tile of tokens.

    ``asked`` is the option schedule: auto is in_forward for a reduced loss, else cached if D of all
    tokens fits beside the logits of a tile of them, else recompute.
    """
    stats_bytes = torch.promote_types(dtype, torch.float32).itemsize
    d_bytes = dtype.itemsize
    budget = max_logits_bytes or LOGITS_BYTES
    kept = T * V * d_bytes
    if not needs_gradient:
        asked = "value"
    elif asked == "auto":
        fits = T <= _KEPT_TOKENS
        if max_logits_bytes is not None:
            fits = kept + 2 * PLANNED.tile_t * V * stats_bytes <= budget
        asked = "in_forward" if is_reduced else "cached" if fits else "recompute"
    if asked == "cached" and max_logits_bytes is not None:
        budget -= kept
    has_groups = asked in ("in_forward", "recompute")
    chunk_t, group_t = sizes(T, V, 2 * stats_bytes, d_bytes if has_groups else 0, budget)
    dweight_dtype = dtype
    if dtype == torch.float16 or -(-T // group_t) > _MOST_ROUNDED:
        dweight_dtype = torch.promote_types(dtype, torch.float32)
    kinds = {
        "value": schedules.Divergence,
        "in_forward": schedules.DivergenceInForward,
        "cached": schedules.DivergenceCached,
        "recompute": schedules.DivergenceRecomputed,
    }
    return kinds[asked](measure, teacher, T, chunk_t, group_t, dweight_dtype)


@functools.lru_cache(maxsize=256)
def sizes(T: int, V: int, logits_bytes: int, d_bytes: int, budget: int) -> tuple[int, int]:
    """Return tokens of a chunk and of a group of whole chunks: what takes the least time.

    ``logits_bytes`` are those of a column of a token in a chunk, ``d_bytes`` in a group, 0 if there
    are no groups. One tile of tokens is taken even if it does not fit.
    """
    tile_t = PLANNED.tile_t
    best = tile_t, tile_t
    least = math.inf
    for chunk_t in range(tile_t, max(T, 1) + tile_t, tile_t):
        for chunks in range(1, _MOST_CHUNKS + 1 if d_bytes else 2):
            group_t = chunk_t * chunks
            fits = V * (logits_bytes * min(T, chunk_t) + d_bytes * min(T, group_t)) <= budget
            if not fits and group_t > tile_t:
                break
            cost: float = _waves(T, V, chunk_t)
            if d_bytes:
                cost += _WAVES_PER_ROW * V * (-(-T // group_t) - 1)
            if cost <= least:
                best = chunk_t, group_t
                least = cost
        if V * logits_bytes * chunk_t > budget:
            break
    chunk_t, group_t = best
    return max(1, min(T, chunk_t)), max(1, min(T, group_t))


def _waves(T: int, V: int, chunk_t: int) -> int:
    """Return the waves of tiles that both models' logits take."""
    whole, left = divmod(T, chunk_t)
    return 2 * (whole * PLANNED.waves(chunk_t, V) + PLANNED.waves(left, V))
