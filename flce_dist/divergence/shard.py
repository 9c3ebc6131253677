"""A teacher's rows cut as the student's are, once, before training.  P ranks, V rows of a rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS, LABELS, check_group, check_tensor
from flce_dist.arguments.dtensor import check_plain
from flce_dist.arguments.rank_check import check_facts, refusals_told
from flce_dist.parallel import collectives

_FUNCTION = "teacher_shard"


def teacher_shard(
    teacher_weight: Tensor,
    rows: Tensor | tuple[int, int],
    *,
    tp_group: dist.ProcessGroup | None = None,
    teacher_start: int | None = None,
) -> Tensor:
    """Return a copy of the teacher's rows for the ids that this rank's rows of the student have.

    For teachers whose vocabulary is padded differently, so that shards begin at other ids, and for
    students of fewer ids. All ranks of ``tp_group`` must call it: each sends its shard once, and
    holds one other rank's beside its own.

    Args:
        teacher_weight: [V', H'], or [V'] of a bias; this rank's shard, of any size.
        rows: half-open (start, end) of the teacher's whole vocabulary, or [V] int64 ids of it.
        tp_group: ranks that share the teacher's vocabulary; None for one process.
        teacher_start: the id of the first row of teacher_weight; by default rank r has the rows
            behind those of the ranks before it.

    Returns:
        [V, H'] or [V], without a graph.

    Raises:
        ValueError: an argument is wrong on some rank, or ranks' weights have other dtypes or H', on
        all ranks; a row that no rank has, on the rank that asks for it.

    Example::

        rows = vocab_range(vocab_size, tp_group.rank(), tp_group.size())  # of the student here
        mine = teacher_shard(teacher_weight, rows, tp_group=tp_group)
    """
    with refusals_told(_FUNCTION, tp_group, teacher_weight):
        _check_weight(teacher_weight)
        check_group(tp_group, sequence_parallel=False)
        rows = _checked_rows(rows, teacher_weight)
        words = "within [0, 2**63)"
        first = values.integer("teacher_start", teacher_start, words, least=0, optional=True)
    source = teacher_weight.detach().contiguous()
    facts = {"dtype": str(source.dtype), "H' of teacher_weight": list(source.shape[1:])}
    check_facts(_FUNCTION, facts, tp_group, source)
    P = collectives.group_size(tp_group)
    rank = collectives.group_rank(tp_group)
    mine = [len(source), -1 if first is None else first]
    of_ranks = torch.tensor([mine], device=source.device)
    sizes = collectives.gather_tokens(of_ranks, tp_group).tolist()
    out = source.new_empty(len(rows), *source.shape[1:])
    has_row = torch.zeros_like(rows)
    start = 0
    for rank_of_part in range(P):
        n, named_start = sizes[rank_of_part]
        start = start if named_start < 0 else named_start
        part = source if rank_of_part == rank else source.new_empty(n, *source.shape[1:])
        if tp_group is not None and P > 1 and n:
            dist.broadcast(part, dist.get_global_rank(tp_group, rank_of_part), group=tp_group)
        here = (rows >= start) & (rows < start + n)
        out[here] = part[rows[here] - start]
        has_row |= here
        start += n
    if not has_row.all():
        missing = rows[has_row == 0][:8].tolist()
        raise ValueError(f"rows must be within the teacher's vocabulary, got {missing}")
    return out


def _check_weight(teacher_weight: Tensor) -> None:
    check_tensor("teacher_weight", teacher_weight, FLOATS)
    check_plain("teacher_weight", teacher_weight, "rows")
    if teacher_weight.dim() not in (1, 2):
        raise ValueError(
            f"teacher_weight must be [V', H'], or [V'] of a bias, got {tuple(teacher_weight.shape)}"
        )


def _checked_rows(rows: Tensor | tuple[int, int], teacher_weight: Tensor) -> Tensor:
    """Return the ids [V] int64 of a range or of a tensor."""
    if not isinstance(rows, Tensor):
        start, end = values.rows("rows", rows) or (0, -1)
        if not 0 <= start <= end:
            raise ValueError(
                "rows must be (start, end) with 0 <= start <= end, or a tensor of ids, got "
                f"{values.shown(rows)}"
            )
        rows = torch.arange(start, end, device=teacher_weight.device)
    check_plain("rows", rows, "rows")
    check_tensor("rows", rows, LABELS, teacher_weight, "teacher_weight")
    if rows.dim() != 1:
        raise ValueError(f"rows must be (start, end) or [V] ids, got {tuple(rows.shape)}")
    return rows.long()
