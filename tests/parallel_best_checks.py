"""Checks of best ids and samples on several ranks: the results of one rank, which has all rows."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from flce_dist import linear_sample, linear_top_k
from flce_dist.kernels.best import chunks
from tests import best_problem
from tests.best_problem import bits
from tests.parallel_ranks import Ranks

_FEW_BYTES = 6000  # of partial statistics: some 40 tokens


def best_ids(ranks: Ranks) -> Iterator[str]:
    """Tokens split or not, and in sections; k more than a shard's blocks.

    On GPUs every bit is compared, on a CPU ids alone.
    """
    for k, dtype in ((1, torch.bfloat16), (40, torch.bfloat16), (40, torch.float32)):
        asked = best_problem.problem(dtype, k, tokens=48 * ranks.P, rows=320 * ranks.P)
        asked = asked.moved(ranks.device)
        whole = results(ranks, asked, slice(None), slice(None))
        rows = slice(320 * ranks.rank, 320 * (ranks.rank + 1))
        for split, part_bytes in ((False, None), (True, None), (True, _FEW_BYTES)):
            tokens = slice(48 * ranks.rank, 48 * (ranks.rank + 1)) if split else slice(None)
            group = {"tp_group": ranks.group, "sequence_parallel": split}
            with mock.patch.object(chunks, "PART_BYTES", part_bytes or chunks.PART_BYTES):
                found = results(ranks, asked, rows, tokens, **group)
            for name, x in found.items():
                if not torch.equal(x, whole[name]):
                    yield (
                        f"k={k}, {dtype}, SP {split}, parts of {part_bytes or 'any'} bytes: "
                        f"{name} is not that of one rank"
                    )


def results(
    ranks: Ranks, asked: best_problem.Asked, rows: slice, tokens: slice, **options: Any
) -> dict[str, torch.Tensor]:
    """Results of a part of the operands, as integers: all, or those that are exact on a CPU."""
    assert asked.bias is not None
    operands = asked.hidden[tokens], asked.weight[rows]
    options = {"bias": asked.bias[rows], "tp_invariant": ranks.on_gpu, **options}
    best = linear_top_k(*operands, asked.k, labels=asked.options["labels"], **options)
    drawn = linear_sample(*operands, 2**40 + 3, **options)
    found = {**best._asdict(), "drawn": drawn.ids, "drawn_logprob": drawn.logprob}
    exact = ("ids", "label_rank", "drawn")
    return {name: bits(x) for name, x in found.items() if ranks.on_gpu or name in exact}
