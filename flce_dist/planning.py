"""``plan``: how a call will be computed.  T tokens of the group, H hidden size, V rows here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.check_options import check_rows
from flce_dist.arguments.check_tensors import check_group, check_tensors, check_tokens
from flce_dist.arguments.decide import planned
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.options import CallOptions, keywords_of
from flce_dist.arguments.passed import Arguments, dtype_in_autocast
from flce_dist.parallel import collectives
from flce_dist.schedules.in_forward import InForward
from flce_dist.schedules.windows import Sizes


@dataclass(frozen=True)
class CallPlan:
    """How one call is computed on a rank; ``print`` shows it in a few lines.

    Columns are those of the largest even shard, vocabulary rows of the weight.
    """

    schedule: str  # "recompute", "cached" or "in_forward", or an object's repr
    tokens: int  # T, with max_counted at most that
    columns: int  # V, without padding
    logits_bytes: int  # most of the logits that exist at a time, beside dweight's memory
    budget: int | None  # that the caller named, or that in_forward took
    cached_columns: int  # held from the statistics to the gradients; others are computed again
    window_columns: int  # of those computed again, at a time; 0 if there are none
    lent_columns: int  # of the cached ones, those that lie in dweight's memory
    chunks: tuple[int, ...]  # tokens that are taken one after the other, in_forward's sizes

    def __str__(self) -> str:
        lines = [
            f"schedule {self.schedule}: {self.tokens} tokens, {self.columns} columns",
            f"logits: {_size(self.logits_bytes)} at most",
            f"cached: {self.cached_columns} columns"
            + (f", {self.lent_columns} of them in dweight's memory" if self.lent_columns else ""),
        ]
        if self.window_columns:
            again = self.columns - self.cached_columns
            lines.append(f"computed again: {again} columns, {self.window_columns} at a time")
        if len(self.chunks) > 1:
            lines.append(f"chunks of tokens: {', '.join(map(str, self.chunks))}")
        return "\n".join(lines)


def plan(
    hidden: Tensor | Sequence[int],
    weight: Tensor | Sequence[int],
    labels: Tensor | Sequence[int],
    *,
    bias: Tensor | Sequence[int] | None = None,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    tp_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    with_metrics: bool = False,
    compiled: bool = False,
    **options: Unpack[CallOptions],
) -> CallPlan:
    """Return how ``linear_cross_entropy`` computes a call with these arguments; computes nothing.

    ::

        print(plan((8192, 4096), (128256, 4096), (8192,)))

    Args:
        hidden, weight, labels, bias: as for ``linear_cross_entropy``, or their shapes on this rank.
            A shape stands for a tensor that needs a gradient; a tensor needs one if its
            ``requires_grad`` says so. Values are not read.
        token_weight, temperature: as there; they change nothing.
        tp_group: as there.
        tp_size: the ranks that share the vocabulary, where no ``tp_group`` exists.
        dtype: of hidden, weight and bias that are shapes; under autocast its dtype counts.
        with_metrics: plan ``linear_cross_entropy_with_metrics``.
        compiled: plan the call under ``torch.compile``.
        **options: those of ``linear_cross_entropy``.

    Raises:
        ValueError: a size, an option or the combination is wrong; a DTensor is given, for which
        pass its local tensor. NotImplementedError: a combination is not supported.
    """
    flags = {"with_metrics": values.flag("with_metrics", with_metrics)}
    checked = checked_options(**keywords_of(plan, options, **flags))
    P = values.count("tp_size", tp_size, optional=True)
    if P is None:
        check_group(tp_group, checked.sequence_parallel)
        P = collectives.group_size(tp_group)
    elif tp_group is not None:
        raise ValueError(f"tp_size must be None with a tp_group, got {tp_size}")
    needs = [torch.is_grad_enabled() and _needs_gradient(x) for x in (hidden, weight, bias)]
    tensors: dict[str, Any] = {
        "hidden": _sizes_of("hidden", hidden, dtype),
        "weight": _sizes_of("weight", weight, dtype),
        "labels": _sizes_of("labels", labels, torch.int64),
        "bias": None if bias is None else _sizes_of("bias", bias, dtype),
    }
    check_tensors(**tensors)
    check_tokens(tensors["hidden"], tensors["labels"], checked, P)
    if tp_size is None or checked.vocab_range is None:  # else no rank is known
        V = len(tensors["weight"])
        rank = collectives.group_rank(tp_group)
        check_rows(V, checked, P=P, rank=rank)

    T = tensors["labels"].numel()
    if checked.max_counted is not None:
        T = min(T, checked.max_counted)
    arguments = Arguments(
        **tensors, token_weight=None, temperature=None, options=checked, tp_group=tp_group
    )
    schedule = planned(arguments, T, needs, P, auto_in_forward=not compiled, converts=False)
    if isinstance(schedule, InForward):
        return _described(schedule, "in_forward")
    if isinstance(schedule, Sizes):
        return _described(schedule, "cached" if schedule.cached_v else "recompute")
    plain = arguments._replace(options=replace(checked, schedule="recompute"))
    sizes: Any = planned(plain, T, needs, P, auto_in_forward=not compiled, converts=False)
    return _described(sizes, repr(checked.schedule))


def _needs_gradient(x: Any) -> bool:
    return x.requires_grad if isinstance(x, Tensor) else x is not None


def _sizes_of(name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the shape, dtype and device of ``x`` in the call, of one element."""
    device = torch.device("cpu")
    if isinstance(x, DTensor):
        raise ValueError(f"{name} must be a tensor or a shape, got a DTensor: pass its local shape")
    if isinstance(x, Tensor):
        dtype = x.dtype
        device = x.device
        x = x.shape
        device = torch.device("cpu") if device.type == "meta" else device
    elif not isinstance(x, Sequence) or isinstance(x, str):
        raise ValueError(f"{name} must be a tensor or its shape, got {values.shown(x)}")
    shape = [values.integer(f"a size of {name}", n, "within [0, 2**63)", least=0) for n in x]
    element = torch.empty((), dtype=dtype, device=device)
    return element.to(dtype_in_autocast(element, device.type)).expand(shape)


def _described(sizes: Sizes, name: str) -> CallPlan:
    chunks = [(0, sizes.T)]
    lent = 0
    if isinstance(sizes, InForward):
        chunks = sizes.chunks()
        lent = sum(columns for columns, _ in sizes.lending)
    return CallPlan(
        schedule=name,
        tokens=sizes.T,
        columns=sizes.V,
        logits_bytes=sizes.logits_bytes,
        budget=sizes.limit,
        cached_columns=sizes.cached_v,
        window_columns=sizes.window_v if sizes.cached_v < sizes.V else 0,
        lent_columns=lent,
        chunks=tuple(last - first for first, last in chunks),
    )


def _size(n: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.2f} {unit}"
    return f"{n} bytes"
