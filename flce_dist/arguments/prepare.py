"""From a caller's arguments to a planned call on flat tensors, of the tokens that count."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments.decide import new_call
from flce_dist.arguments.decided_once import calls, facts_of
from flce_dist.arguments.passed import Arguments
from flce_dist.core.call import Call, Needs, Operands, as_stored
from flce_dist.core.interface import Schedule
from flce_dist.kernels.rows.counted_tokens import counted_tokens
from flce_dist.parallel import collectives
from flce_dist.torch_private.devices import assert_soon


def prepare(
    arguments: Arguments,
    needs: Needs,
    *,
    is_compiled: bool = False,
    scores: Callable[[Any], Schedule] | None = None,
    last_columns: Tensor | None = None,
) -> tuple[Call, Operands]:
    """Check the arguments' metadata, plan, and flatten tokens to one dimension.

    ``is_compiled`` says whether this is an operator of torch.compile. ``scores``, if any, makes the
    schedule of scores from the one that the loss would take. ``last_columns`` are those of weight
    that alone are trained. Label values are not checked here: that reads data.
    """
    width = None if last_columns is None else last_columns.shape[1]
    facts = facts_of(arguments, needs, is_compiled, scores, width)
    call = None if facts is None else calls.recall(facts)
    if call is None:
        call = new_call(arguments, needs, is_compiled=is_compiled, scores=scores, width=width)
        if facts is not None:
            calls.remember(facts, call)
    hidden, weight, labels, bias, token_weight, temperature, *_ = arguments

    def of_tokens(x: Tensor) -> Tensor:  # in the dtype of statistics, so that the loss keeps it
        return as_stored(x).reshape(-1).to(call.stats_dtype).contiguous()

    token_weight = None if token_weight is None else of_tokens(token_weight)
    inverse_temperature = None
    if temperature is not None:
        temperature = of_tokens(temperature)
        inverse = temperature.reciprocal()
        is_usable = (inverse > 0) & (inverse < torch.inf)
        inverse_temperature = inverse.where(is_usable, torch.nan)
    if scores is None:  # else it only had their shape
        if labels.dim() != 1:
            labels = labels.reshape(-1)
        labels = labels.long().contiguous()
    if hidden.dim() != 2:  # a view is a node of the graph, too
        hidden = hidden.reshape(-1, hidden.shape[-1])
    return call, Operands(
        hidden=as_stored(hidden),
        weight=as_stored(weight),
        bias=as_stored(bias),
        labels=labels,
        token_weight=token_weight,
        inverse_temperature=inverse_temperature,
        last_columns=last_columns,
    )


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
    weights = token_weight if call.chooses_tokens else None  # else those of weight 0 count, too
    check_labels(call, labels, weights, inverse)
    if inverse is None and not call.chooses_tokens:
        return operands
    if call.chooses_tokens:
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


def check_labels(
    call: Call, labels: Tensor, token_weight: Tensor | None, inverse: Tensor | None
) -> None:
    """Check that the labels [T] that count are in the vocabulary, and are at most max_counted.

    With ``token_weight`` [T] those of weight 0 do not count. Also check the temperatures of those
    that do: ``inverse`` [T] is NaN where one is not finite and above 0. On a GPU, for which the
    host must not wait, ``logits_at_ids`` asserts labels and temperatures, ``counted_tokens`` how
    many count. Functions without ``logits_at_ids`` call ``check_temperatures`` themselves.
    """
    if labels.is_cuda:
        return
    options = call.options
    vocab_size = call.vocab_size
    ignore_index = options.ignore_index
    max_counted = options.max_counted
    P = collectives.group_size(call.tp_group)
    T_of_rank = len(labels) // P if options.data_parallel else None
    counted = labels != ignore_index
    if token_weight is not None:
        counted &= token_weight != 0
    if max_counted is not None and (n_counted := int(counted.sum())) > max_counted:
        of_all = " on all ranks" if options.data_parallel else ""
        raise ValueError(
            f"max_counted must be at least the {n_counted} tokens that count{of_all}, "
            f"got {max_counted}"
        )
    bad = (((labels < 0) | (labels >= vocab_size)) & counted).to(torch.uint8)
    if bad.any():
        where = int(bad.argmax())
        label = int(labels[where])
        raise ValueError(
            f"labels must be within [0, {vocab_size}) or ignore_index {ignore_index}, "
            f"got {label} at {_place(where, T_of_rank)}{_way_out_of(label, call, P)}"
        )
    check_temperatures(inverse, counted, T_of_rank=T_of_rank)


def _way_out_of(label: int, call: Call, P: int) -> str:
    """Return what may be meant by a label that is not in the vocabulary, of P ranks."""
    options = call.options
    if label < 0:
        return (
            f": to leave such tokens out, give them the label {options.ignore_index} or pass "
            f"ignore_index={label}"
        )
    if options.vocab_size is not None:
        return f": pass a larger vocab_size if weight has a row {label} that is no padding"
    if P > 1:
        return (
            f": weight has {call.vocab_size} rows on the {P} ranks of {options.group_name} "
            "together, which must be all ranks that share the vocabulary"
        )
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return "" if is_alone else f": if weight is one rank's rows, pass {options.group_name}"


def check_temperatures(
    inverse: Tensor | None,
    counted: Tensor,
    name: str = "temperature",
    T_of_rank: int | None = None,
) -> None:
    """Check that no token that counts, [T] bool, has NaN for one over its temperature.

    ``T_of_rank`` are the tokens that each rank passed, if they are gathered. On a GPU, for which
    the host must not wait, the device asserts it.
    """
    if inverse is None:
        return
    words = f"{name} must be finite and above 0 for each token that counts"
    bad = inverse.isnan() & counted
    if bad.is_cuda:
        assert_soon(~bad.any(), words)
    elif bad.any():
        where = int(bad.to(torch.uint8).argmax())
        place = _place(where, T_of_rank)
        raise ValueError(f"{words}, got 0, infinity, NaN or a negative number at {place}")


def _place(where: int, T_of_rank: int | None) -> str:
    """Return where a token is among those of all ranks, or those that a rank passed."""
    if T_of_rank is None:
        return f"token {where}"
    return f"token {where % T_of_rank} of rank {where // T_of_rank}"
