"""``plan``: how a call will be computed.  T tokens of the group, H hidden size, V rows here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from flce_dist.arguments import values
from flce_dist.arguments.check_options import (
    check_compiled,
    check_impl,
    check_invariant,
    check_rows,
    known_shards,
)
from flce_dist.arguments.check_tensors import (
    check_group,
    check_numbers,
    check_tensors,
    check_tokens,
    dtype_in_autocast,
    is_dense,
)
from flce_dist.arguments.decide import planned
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.dtensor import check_has_memory
from flce_dist.arguments.low_rank import check_factors, check_pair
from flce_dist.arguments.options import CallOptions, LossOptions, keywords_of
from flce_dist.arguments.passed import Arguments
from flce_dist.core.call import Needs
from flce_dist.parallel import collectives
from flce_dist.schedules.costs import Shapes, chunk_sizes, gemms, total_bytes
from flce_dist.schedules.fit import Plan
from flce_dist.schedules.in_forward import InForward
from flce_dist.schedules.windows import Windows


@dataclass(frozen=True)
class CallPlan:
    """How one call is computed on a rank; ``print`` shows it in a few lines.

    Columns are those of the largest even shard, vocabulary rows of the weight. Of a schedule object
    GEMMs and bytes are those of recompute.
    """

    schedule: str  # "recompute", "cached" or "in_forward", or an object's repr
    tokens: int  # T, with max_counted at most that
    columns: int  # V, without padding
    forward_gemms: float  # of 2 T H V flop each; with low_rank H is H + r
    backward_gemms: float  # one more if a gradient of the entropy arrives
    total_bytes: int  # most that exists beyond operands and gradients; docs/scaling.md has the sum
    logits_bytes: int  # most of the logits that exist at a time, beside dweight's memory
    budget: int | None  # that the caller named, or that in_forward took
    cached_columns: int  # held from the statistics to the gradients; others are computed again
    window_columns: int  # of those computed again, at a time; 0 if there are none
    lent_columns: int  # of the cached ones, those that lie in dweight's memory
    chunks: tuple[int, ...]  # tokens of the group that are taken one after the other

    def __str__(self) -> str:
        lines = [
            f"schedule {self.schedule}: {self.tokens} tokens, {self.columns} columns",
            f"GEMMs: {self.forward_gemms:.3g} in forward, {self.backward_gemms:.3g} in backward",
            f"memory beyond gradients: {_size(self.total_bytes)}",
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
    low_rank: tuple[Tensor | Sequence[int], Tensor | Sequence[int]] | None = None,
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

    Example::

        print(plan((8192, 4096), (128256, 4096), (8192,)))

    Args:
        hidden, weight, labels, bias, low_rank: as for ``linear_cross_entropy``, or their shapes on
            this rank. A shape stands for a tensor that needs a gradient; a tensor needs one if its
            ``requires_grad`` says so. Values are not read.
        token_weight, temperature: as there; they are checked, and change nothing.
        tp_group: as there.
        tp_size: the ranks that share the vocabulary, where no ``tp_group`` exists.
        dtype: of operands that are shapes; under autocast its dtype counts.
        with_metrics: plan ``linear_cross_entropy_with_metrics``.
        compiled: plan the call under ``torch.compile``.
        **options: those of ``linear_cross_entropy``.

    Raises:
        ValueError: a size, an option or the combination is wrong; a DTensor is given, for which
        pass its local tensor. NotImplementedError: a combination is not supported.
    """
    flags = {"with_metrics": values.flag("with_metrics", with_metrics)}
    checked = checked_options(**keywords_of(plan, options, **flags))
    of_tokens: dict[str, Any] = {"token_weight": token_weight, "temperature": temperature}
    if not isinstance(temperature, Tensor):
        values.positive("temperature", of_tokens.pop("temperature"))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, got {values.shown(dtype)}")
    P = _ranks(tp_group, tp_size, checked)
    tensors: dict[str, Any] = {
        "hidden": _sizes_of("hidden", hidden, dtype),
        "weight": _sizes_of("weight", weight, dtype),
        "labels": _sizes_of("labels", labels, torch.int64),
        "bias": None if bias is None else _sizes_of("bias", bias, dtype),
    }
    needs = _needs(hidden, weight, bias)
    if values.flag("compiled", compiled) and low_rank is None:  # as such a call, before all else
        check_compiled(checked, needs)
    device = tensors["hidden"].device
    check_tensors(**tensors)
    hidden_sizes = tensors["hidden"]
    labels_sizes = tensors["labels"]
    check_tokens(hidden_sizes, labels_sizes, checked, P)
    numbers = {name: _stand_in(x, device) for name, x in of_tokens.items()}
    check_numbers(hidden_sizes, labels_sizes, **numbers)
    operands = _Operands(tensors, needs)
    if low_rank is not None:
        operands = _with_low_rank(operands, low_rank, checked, dtype)
        if compiled:
            check_compiled(checked, operands.needs)
    tensors, needs, trained, copies = operands
    if tp_size is None or checked.vocab_range is None:  # else no rank is known
        V = len(tensors["weight"])
        check_rows(V, checked, P=P, rank=collectives.group_rank(tp_group))
    impl = _checked_impl(hidden, tensors["hidden"].dtype, checked)

    T_all = tensors["labels"].numel()
    T = T_all if checked.max_counted is None else min(T_all, checked.max_counted)
    arguments = Arguments(
        **tensors, token_weight=None, temperature=None, options=checked, tp_group=tp_group
    )
    schedule, sizes = _planned(arguments, T, needs, P, compiled=compiled, trained=trained)
    if checked.tp_invariant:
        check_invariant(impl, known_shards(len(tensors["weight"]), checked, P=P))
    return _described(schedule, sizes, needs, _shapes(arguments, P, trained), copies)


def _ranks(tp_group: Any, tp_size: int | None, options: LossOptions) -> int:
    """Return how many ranks share the vocabulary, by the group or without one."""
    P: int | None = values.count("tp_size", tp_size, optional=True)
    if P is None:
        check_group(tp_group, sequence_parallel=options.sequence_parallel)
        return collectives.group_size(tp_group)
    if tp_group is not None:
        raise ValueError(f"tp_size must be None with a tp_group, got {tp_size}")
    return P


def _shapes(arguments: Arguments, P: int, trained: int | None) -> Shapes:
    """Return what the costs of a call follow from beside its schedule."""
    options = arguments.options
    H = arguments.weight.shape[1]
    return Shapes(
        H=H,
        trained=H if trained is None else trained,
        itemsize=arguments.hidden.element_size(),
        T_all=arguments.labels.numel(),
        P=P,
        sequence_parallel=options.sequence_parallel,
        reduces_dhidden=options.reduce_dhidden,
        chooses_tokens=options.chooses_tokens,
        accumulates_dweight=options.accumulate_dweight,
        sums_in_fp32=options.reduce_in_fp32,
    )


def _planned(
    arguments: Arguments, T: int, needs: Needs, P: int, *, compiled: bool, trained: int | None
) -> tuple[str, Plan]:
    """Return the schedule's name and sizes; of an object its repr, and the sizes of recompute."""

    def sizes_of(arguments: Arguments) -> Any:
        return planned(arguments, T, needs, P, is_compiled=compiled, converts=False, width=trained)

    sizes = sizes_of(arguments)
    if isinstance(sizes, InForward):
        return "in_forward", sizes
    if isinstance(sizes, Windows):
        return "cached" if sizes.cached_v else "recompute", sizes
    options = arguments.options
    plain = arguments._replace(options=replace(options, schedule="recompute"))
    return repr(options.schedule), sizes_of(plain)


def _checked_impl(hidden: Any, dtype: torch.dtype, options: LossOptions) -> str:
    """Return the call's kernels, which can do it; those of a shape are Triton's unless it says."""
    device = hidden.device if isinstance(hidden, Tensor) and not hidden.is_meta else None
    is_on_gpu = device is None or device.type == "cuda"
    impl = options.impl or ("triton" if is_on_gpu else "eager")
    if device is not None or options.impl is not None:
        check_impl(impl, dtype, device)
    return impl


class _Operands(NamedTuple):
    """What stands for the tensors of a call, by their names, and what follows from ``low_rank``."""

    tensors: dict[str, Any]
    needs: Needs
    trained: int | None = None  # columns of weight that alone are
    copies: int = 0  # bytes of operands that the call copies


def _with_low_rank(
    operands: _Operands, low_rank: Any, options: LossOptions, dtype: torch.dtype
) -> _Operands:
    """Return the operands with the columns of ``low_rank`` behind those of hidden and weight."""
    tensors, needs, *_ = operands
    sizes = low_rank
    if isinstance(low_rank, (tuple, list)):
        sizes = [_sizes_of(f"low_rank[{i}]", x, dtype) for i, x in enumerate(low_rank)]
    check_pair(sizes, options)
    x, b = sizes
    check_factors(x, b, tensors["hidden"], tensors["weight"])
    rank = b.shape[1]
    wide = {name: _widened(tensors[name], rank) for name in ("hidden", "weight")}
    x_needs, b_needs, _ = _needs(*low_rank, None)
    return _Operands(
        {**tensors, **wide},
        Needs(needs.hidden or x_needs, needs.weight or b_needs, needs.bias),
        trained=rank if b_needs and not needs.weight else None,
        copies=sum(x.nbytes for x in wide.values()),
    )


def _widened(x: Tensor, columns: int) -> Tensor:
    return x.new_empty(()).expand(*x.shape[:-1], x.shape[-1] + columns)


def _needs(*operands: Any) -> Needs:
    """Return which of three tensors or shapes need a gradient now."""
    is_on = torch.is_grad_enabled()
    return Needs(*(is_on and _needs_gradient(x) for x in operands))


def _needs_gradient(x: Any) -> bool:
    return x.requires_grad if isinstance(x, Tensor) else x is not None


def _sizes_of(name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the shape, dtype and device of ``x`` in the call, of one element."""
    device = torch.device("cpu")
    if isinstance(x, DTensor):
        raise ValueError(f"{name} must be a tensor or a shape, got a DTensor: pass its local shape")
    if isinstance(x, Tensor):
        if not is_dense(x) or x.is_quantized:
            return x  # for check_tensors, which refuses it
        check_has_memory(name, x)
        dtype = x.dtype
        device = x.device
        x = x.shape
        device = torch.device("cpu") if device.type == "meta" else device
    elif not isinstance(x, Sequence) or isinstance(x, str):
        raise ValueError(f"{name} must be a tensor or its shape, got {values.shown(x)}")
    shape = [values.integer(f"a size of {name}", n, "within [0, 2**63)", least=0) for n in x]
    element = torch.empty((), dtype=dtype, device=device)
    return element.to(dtype_in_autocast(element, device.type)).expand(shape)


def _stand_in(x: Any, device: torch.device) -> Any:
    """Return what stands for a tensor of a number for each token, if it is one with metadata."""
    if not isinstance(x, Tensor) or not is_dense(x) or x.is_quantized:
        return x
    element = torch.empty((), dtype=x.dtype, device=device if x.is_meta else x.device)
    return element.requires_grad_(x.requires_grad).expand(x.shape)


def _described(schedule: str, sizes: Plan, needs: Needs, shapes: Shapes, copies: int) -> CallPlan:
    """Return the plan; ``copies`` are bytes of operands that the call copies."""
    lent = 0
    if isinstance(sizes, InForward):
        lent = sum(columns for columns, _ in sizes.lending)
    forward_gemms, backward_gemms = gemms(sizes, needs, shapes)
    return CallPlan(
        schedule=schedule,
        tokens=sizes.T,
        columns=sizes.V,
        forward_gemms=forward_gemms,
        backward_gemms=backward_gemms,
        total_bytes=total_bytes(sizes, needs, shapes) + copies,
        logits_bytes=sizes.logits_bytes,
        budget=sizes.limit,
        cached_columns=sizes.cached_v,
        window_columns=sizes.window_v if sizes.cached_v < sizes.V else 0,
        lent_columns=lent,
        chunks=tuple(chunk_sizes(sizes, shapes)),
    )


def _size(n: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.2f} {unit}"
    return f"{n} bytes"
