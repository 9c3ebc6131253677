"""What the facts of a call decide: its checks, its sizes and its schedule."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from flce_dist.arguments.check_options import (
    check_impl,
    check_invariant,
    check_rows,
    known_shards,
)
from flce_dist.arguments.options import LossOptions
from flce_dist.arguments.passed import Arguments, check_passed
from flce_dist.core.call import Call, Needs
from flce_dist.core.interface import Compilable, Schedule
from flce_dist.kernels.interface import kernels_of
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import largest_shard, real_rows
from flce_dist.schedules.choose import FEW_COLUMNS, choose_schedule


def new_call(
    arguments: Arguments,
    needs: Needs,
    *,
    is_compiled: bool,
    scores: Callable[[Any], Schedule] | None,
    width: int | None,
) -> Call:
    """Check the arguments, and decide everything about the call that their facts decide.

    ``width`` is that of ``last_columns``.
    """
    hidden, weight, labels, *_, options, tp_group = arguments
    P = check_passed(arguments)
    V = len(weight)
    rank = collectives.group_rank(tp_group)
    T_all = labels.numel()
    T = T_all if options.max_counted is None else torch.sym_min(T_all, options.max_counted)
    check_rows(V, options, P=P, rank=rank)
    impl = options.impl or ("triton" if hidden.is_cuda else "eager")
    check_impl(impl, hidden.dtype, hidden.device)

    of_loss = planned(
        arguments,
        T,
        needs,
        P,
        is_compiled=is_compiled,
        converts=scores is not None,
        width=width,
    )
    schedule = of_loss if scores is None else scores(of_loss)
    vocab_size = V * P if options.vocab_size is None else options.vocab_size
    start, end = options.vocab_range or (rank * V, (rank + 1) * V)
    if options.tp_invariant:
        check_invariant(impl, known_shards(V, options, P=P))
    return Call(
        options=options,
        dtype=hidden.dtype,
        T=T,
        T_all=T_all,
        vocab_start_index=start,
        V=real_rows((start, end), vocab_size),
        vocab_size=vocab_size,
        needs=needs,
        schedule=schedule,
        impl=impl,
        kernels=kernels_of(impl),
        # One rank exchanges nothing.
        group=None if tp_group is None or P == 1 else weakref.ref(tp_group),
    )


def planned(
    arguments: Arguments,
    T: int,
    needs: Needs,
    P: int,
    *,
    is_compiled: bool,
    converts: bool,
    width: int | None = None,
) -> Compilable:
    """Return the schedule; it ``converts`` if backward copies cached columns window by window.

    dweight has ``width`` columns, or those of weight.
    """
    hidden = arguments.hidden
    weight = arguments.weight
    options = arguments.options
    rows, H = weight.shape
    name = options.schedule if isinstance(options.schedule, str) else "recompute"
    frozen = needs.hidden and not (needs.weight or needs.bias or options.with_metrics)
    if frozen and name in ("auto", "in_forward"):
        converts = False  # forward's D contains no upstream gradients
    if name == "in_forward" and options.reduction == "none" and any(needs) and not frozen:
        raise NotImplementedError(
            "schedule='in_forward' with an upstream gradient of each token (reduction='none', "
            "scores) needs a weight and bias that need no gradient, and no metrics or entropy: use "
            "schedule='recompute' or 'cached'"
        )
    V = largest_shard(
        rows,
        vocab_size=options.vocab_size,
        is_uneven=options.vocab_range is not None,
        P=P,
    )
    dweight_row_bytes = (0, 0)
    if needs.weight and _is_concrete(T, V, H, options.max_logits_bytes):
        columns = H if width is None else width
        itemsize = weight.element_size()
        dweight_row_bytes = (columns * itemsize, columns * max(4, itemsize))
    schedule: Compilable = choose_schedule(
        T=T,
        V=V,
        itemsize=hidden.element_size(),
        schedule=name if any(needs) else "recompute",
        max_logits_bytes=options.max_logits_bytes,
        expressible=_is_expressible(options, hidden.dtype, rows * P),
        converts=converts or hidden.dtype == torch.float16,
        dweight_row_bytes=dweight_row_bytes,
        reduces=not is_compiled and options.reduction != "none" and not options.with_metrics,
        frozen=frozen,
    )
    if not isinstance(options.schedule, str) and (any(needs) or options.with_metrics):
        return options.schedule.sized(schedule)
    return schedule


def _is_concrete(*sizes: int | None) -> bool:
    """Whether these are numbers, so that dweight's memory may be planned with.

    A plan of torch.compile's symbolic sizes only gives the fakes their shapes; the operators plan
    again with real sizes. So it lends no memory.
    """
    return all(size is None or isinstance(size, int) for size in sizes)


def _is_expressible(options: LossOptions, dtype: torch.dtype, rows: int) -> bool:
    """Whether cached exponentials express the gradient as accurately as the operands' dtype.

    ``rows`` are those of all ranks' weights, padding included.
    """
    vocab_size = rows if options.vocab_size is None else options.vocab_size
    cancels = options.smoothing_cancels(dtype, vocab_size)
    few_in_fp16 = dtype == torch.float16 and vocab_size <= FEW_COLUMNS
    return not (options.smoothing_is_capped or cancels or few_in_fp16)
