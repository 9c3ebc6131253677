"""From a caller's arguments to a planned call on flat tensors."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments import checks, values
from flce_dist.arguments.options import LossOptions
from flce_dist.core.call import Call, Needs, Operands, Schedule, as_stored
from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.rows.counted_tokens import counted_tokens
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import largest_shard, real_rows
from flce_dist.schedules.choose import plan

_Result = TypeVar("_Result", Tensor, Tensor | None)

PLAIN = (Tensor, torch.nn.Parameter)
_LOCAL = {*PLAIN, float, type(None)}  # types of arguments that no rank shares


class Arguments(NamedTuple):
    """The arguments of ``linear_cross_entropy``, before and after they are ``settled``."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    temperature: Any  # of ``tempered``, which scores call after ``localized``
    options: LossOptions
    tp_group: dist.ProcessGroup | None

    @property
    def may_have_dtensors(self) -> bool:
        return not _LOCAL.issuperset(map(type, self[:6]))


def tempered(temperature: Any, labels: Tensor) -> Tensor | None:
    """Return the temperature of each token; None if it is the number 1."""
    if isinstance(temperature, Tensor):
        return temperature
    if type(temperature) is float and temperature == 1.0:  # the default
        return None
    temperature = values.positive("temperature", temperature)
    if temperature == 1.0:
        return None
    checks.check_tensor("labels", labels, checks.LABELS)
    return torch.full_like(labels, temperature, dtype=torch.float64)


def shape_of_tokens(hidden: Tensor, options: LossOptions, tp_group: Any) -> list[int]:
    """Return the shape that labels of hidden's tokens have, or those of all ranks."""
    tokens = list(hidden.shape[:-1])
    if options.sequence_parallel and options.sequence_dim < len(tokens):
        checks.check_group(tp_group, options.sequence_parallel)
        tokens[options.sequence_dim] *= collectives.group_size(tp_group)
    return tokens


def sequence_first(arguments: Arguments) -> Arguments:
    """Return the arguments with the dimension that is split by token as the first.

    [B, S / P, H] of each rank then follow one another, as [S / P, B, H], in the order of labels.
    """
    options = arguments.options
    if not (options.sequence_parallel and options.sequence_dim):
        return arguments
    _check_tensors(arguments)
    names = ("hidden", "labels", "token_weight", "temperature")
    of_tokens = {name: getattr(arguments, name) for name in names}
    turned = {name: x.transpose(0, 1) for name, x in of_tokens.items() if x is not None}
    return arguments._replace(**turned, options=replace(options, sequence_dim=0))


def in_callers_order(
    results: Iterable[_Result], given: Arguments, arguments: Arguments
) -> tuple[_Result, ...]:
    """Undo ``sequence_first`` in results; ``given`` are the ``arguments``, settled."""
    if given.options is arguments.options:
        return tuple(results)
    return tuple(
        x.transpose(0, 1).contiguous() if x is not None and x.dim() else x for x in results
    )


def in_autocast_dtype(arguments: Arguments) -> Arguments:
    """Under autocast, cast the operands to its dtype as ``torch.nn.functional.linear`` does."""
    hidden = arguments.hidden
    weight = arguments.weight
    bias = arguments.bias
    if not isinstance(hidden, Tensor):
        return arguments
    device_type = hidden.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return arguments

    def to(x: Any) -> Any:
        return x.to(dtype_in_autocast(x, device_type)) if isinstance(x, Tensor) else x

    return arguments._replace(hidden=to(hidden), weight=to(weight), bias=to(bias))


def dtype_in_autocast(x: Tensor, device_type: str) -> torch.dtype:
    """Return the dtype of operand x in a call on such a device."""
    takes_part = x.is_floating_point() and x.dtype != torch.float64
    is_on = takes_part and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else x.dtype


def settled(
    arguments: Arguments, last_columns: Tensor | None = None
) -> tuple[Arguments, list[bool]]:
    """Return the arguments as they are computed, and whether each operand needs a gradient now.

    ``last_columns`` are those of the weight that alone are trained, if so.
    """
    arguments = in_autocast_dtype(sequence_first(arguments))
    trained = arguments.weight if last_columns is None else last_columns
    operands = (arguments.hidden, trained, arguments.bias)
    is_on = torch.is_grad_enabled()
    return arguments, [is_on and getattr(x, "requires_grad", False) for x in operands]


class RecentCalls(OrderedDict[Any, Call]):
    """Calls of which all facts were checked and planned before, by these facts.

    The least recently used one makes room. Groups are held weakly. Threads may share it.
    """

    most = 256

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def known(self, facts: Any) -> Call | None:
        with self._lock:
            call = self.get(facts)
            if call is not None:
                self.move_to_end(facts)
            return call

    def remember(self, facts: Any, call: Call) -> None:
        with self._lock:
            self[facts] = call
            if len(self) > self.most:
                self.popitem(last=False)


calls = RecentCalls()


def prepare(
    arguments: Arguments,
    needs: list[bool],
    *,
    auto_in_forward: bool = True,
    scores: Callable[[Any], Schedule] | None = None,
    last_columns: Tensor | None = None,
) -> tuple[Call, Operands]:
    """Check the arguments' metadata, plan, and flatten tokens to one dimension.

    ``needs`` says whether hidden, weight and bias need a gradient; ``auto_in_forward`` whether
    schedule="auto" may become in_forward, ``scores`` the schedule instead of one of the loss, made
    from that. ``last_columns`` are those of weight that alone are trained. Label values are not
    checked here: that reads data.
    """
    width = None if last_columns is None else last_columns.shape[1]
    facts = _facts(arguments, needs, auto_in_forward, scores, width)
    call = None if facts is None else calls.known(facts)
    if call is None:
        call = _checked_call(arguments, needs, auto_in_forward, scores, width)
        if facts is not None:
            calls.remember(facts, call)
    hidden, weight, labels, bias, token_weight, temperature, *_ = arguments

    def of_tokens(x: Tensor) -> Tensor:  # in the dtype of statistics, so that the loss keeps it
        return as_stored(x).reshape(-1).to(call.stats_dtype).contiguous()

    token_weight = None if token_weight is None else of_tokens(token_weight)
    if temperature is not None:
        temperature = of_tokens(temperature)
        temperature = temperature.reciprocal().where(temperature > 0, torch.nan)
    if scores is None:  # else it only had their shape
        if labels.dim() != 1:
            labels = labels.reshape(-1)
        labels = labels.long().contiguous()
    if hidden.dim() != 2:  # a view is a node of the graph, too
        hidden = hidden.reshape(-1, hidden.shape[-1])
    hidden = as_stored(hidden)
    weight = as_stored(weight)
    bias = as_stored(bias)
    operands = Operands(hidden, weight, bias, labels, token_weight, None, temperature)
    return call, operands._replace(last_columns=last_columns)


def counted_operands(call: Call, operands: Operands) -> Operands:
    """Check labels; with max_counted or skip_ignored choose T tokens, first all that count.

    hidden stays that of T_all tokens: ``transport.gather`` takes the rows at ``places``.
    """
    options = call.options
    labels = operands.labels
    token_weight = operands.token_weight
    places = None
    n_counted = None
    inverse = operands.inverse_temperature
    P = collectives.group_size(call.tp_group)
    weighs = token_weight if call.partitions else None
    checks.check_labels(labels, weighs, inverse, call.vocab_size, options, P=P)
    if inverse is None and not call.partitions:
        return operands
    if call.partitions:
        places, labels, token_weight, n_counted = counted_tokens(
            labels, token_weight, call.T, ignore_index=options.ignore_index
        )
        inverse = None if inverse is None else inverse[places]
        if not (options.skip_ignored and call.schedule.skips_ignored):
            n_counted = None  # the order alone is of use
    if inverse is not None:
        inverse = inverse.where(labels != options.ignore_index, 1.0)
    return operands._replace(
        labels=labels,
        token_weight=token_weight,
        places=places,
        inverse_temperature=inverse,
        n_counted=n_counted,
    )


def _facts(arguments: Arguments, needs: list[bool], *others: Any) -> Any:
    """Return all that a ``Call`` depends on, hashable; None if only checks can tell."""
    group = arguments.tp_group
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return None
    weak = None if group is None else weakref.ref(group)
    facts: list[Any] = [arguments.options, *needs, *others, weak]
    for x in arguments[:6]:
        if x is None:
            facts.append(None)
            continue
        if x.__class__ not in PLAIN or x.is_nested:
            return None
        facts.append((x.shape, x.dtype, x.device, x.layout, x.requires_grad))
    return tuple(facts)


def _checked_call(
    arguments: Arguments,
    needs: list[bool],
    auto_in_forward: bool,
    scores: Callable[[Any], Schedule] | None,
    width: int | None,
) -> Call:
    """Check the arguments, and decide everything about the call that their facts decide.

    ``width`` is that of ``last_columns``.
    """
    hidden, weight, labels, *_, options, tp_group = arguments
    P = _check_tensors(arguments)
    V = len(weight)
    rank = collectives.group_rank(tp_group)
    T_all = labels.numel()
    T = T_all if options.max_counted is None else torch.sym_min(T_all, options.max_counted)
    checks.check_rows(V, options, P=P, rank=rank)
    impl = options.impl or ("triton" if hidden.is_cuda else "eager")
    checks.check_impl(impl, hidden)

    converts = scores is not None
    schedule = planned(arguments, T, needs, P, auto_in_forward, converts=converts, width=width)
    if scores is not None:
        schedule = scores(schedule)
    vocab_size = V * P if options.vocab_size is None else options.vocab_size
    start, end = options.vocab_range or (rank * V, (rank + 1) * V)
    if options.tp_invariant:
        alike = [(r * V, (r + 1) * V) for r in range(P)]
        checks.check_invariant(impl, [(start, end)] if options.vocab_range else alike)
    return Call(
        options=options,
        dtype=hidden.dtype,
        T=T,
        T_all=T_all,
        vocab_start_index=start,
        V=real_rows((start, end), vocab_size),
        vocab_size=vocab_size,
        needs=Needs(*needs),
        schedule=schedule,
        impl=impl,
        kernels=kernels_of(impl),
        # One rank exchanges nothing.
        group=None if tp_group is None or P == 1 else weakref.ref(tp_group),
    )


def _check_tensors(arguments: Arguments) -> int:
    """Check the group, and the tensors as far as its size P tells; return P."""
    hidden, weight, labels, bias, token_weight, temperature, options, tp_group = arguments
    checks.check_group(tp_group, options.sequence_parallel)
    of_tokens = {"token_weight": token_weight, "temperature": temperature}
    checks.check_tensors(hidden, weight, labels, bias, **of_tokens)
    P = collectives.group_size(tp_group)
    checks.check_tokens(hidden, labels, options, P)
    return P


def planned(
    arguments: Arguments,
    T: int,
    needs: list[bool],
    P: int,
    auto_in_forward: bool,
    converts: bool,
    width: int | None = None,
) -> Schedule:
    """Return the schedule; it ``converts`` if backward copies cached columns window by window.

    dweight has ``width`` columns, or those of weight.
    """
    hidden = arguments.hidden
    weight = arguments.weight
    options = arguments.options
    V, H = weight.shape
    itemsize = weight.element_size()
    width = H if width is None else width
    is_uneven = options.vocab_range is not None
    V = largest_shard(V, vocab_size=options.vocab_size, is_uneven=is_uneven, P=P)
    # A plan of torch.compile's symbolic sizes only gives the fakes their shapes; the operators
    # plan again with real sizes. So it lends no memory.
    is_concrete = all(isinstance(size, int) for size in (T, V, H, options.max_logits_bytes or 0))
    name = options.schedule if isinstance(options.schedule, str) else "recompute"
    frozen = needs[0] and not (needs[1] or needs[2]) and not options.with_metrics
    if frozen and name in ("auto", "in_forward"):
        converts = False  # forward's D contains no upstream gradients
    if name == "in_forward" and options.reduction == "none" and any(needs) and not frozen:
        raise NotImplementedError(
            "schedule='in_forward' with an upstream gradient of each token (reduction='none', "
            "scores) needs a weight and bias that need no gradient, and no metrics or entropy: use "
            "schedule='recompute' or 'cached'"
        )
    schedule: Schedule = plan(
        T=T,
        V=V,
        itemsize=max(2, hidden.element_size()),
        schedule=name if any(needs) else "recompute",
        max_logits_bytes=options.max_logits_bytes,
        expressible=not options.smoothing_needs_logits,
        converts=converts or hidden.dtype == torch.float16,
        dweight_row_bytes=(width * itemsize, width * max(4, itemsize))
        if is_concrete and needs[1]
        else (0, 0),
        reduces=auto_in_forward and options.reduction != "none" and not options.with_metrics,
        frozen=frozen,
    )
    if not isinstance(options.schedule, str) and (any(needs) or options.with_metrics):
        return options.schedule.sized(schedule)
    return schedule
