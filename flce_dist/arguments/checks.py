"""Checks of arguments; errors name the argument, what is expected and what was given."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments import values, ways_out
from flce_dist.arguments.options import LossOptions
from flce_dist.parallel.vocab import INVARIANT_ROWS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LABELS = (torch.int64, torch.int32)


def checked_options(**given: Any) -> LossOptions:
    """Return the options of these keywords, checked once for the same keywords."""
    if not torch.compiler.is_compiling():
        ends = given.get("vocab_range")  # into which typed=True does not look
        types = map(type, ends) if isinstance(ends, tuple) else ()
        try:
            return _checked_once(*types, **given)
        except TypeError:  # a value is not hashable
            pass
    return check_options(LossOptions(**given))


@functools.lru_cache(typed=True)
def _checked_once(*_: type, **given: Any) -> LossOptions:
    return check_options(LossOptions(**given))


def check_options(options: LossOptions) -> LossOptions:
    """Check what does not depend on tensors; return the options with values of Python's types."""
    options = values.checked(options)
    if options.sequence_parallel and not options.reduce_dhidden:
        raise ValueError(
            "reduce_dhidden=False leaves the sum over ranks to the caller, but "
            "sequence_parallel=True makes it part of the reduce-scatter; drop one of the two"
        )
    if options.reduce_in_fp32 and not options.reduce_dhidden:
        raise ValueError(
            "reduce_in_fp32=True sums dhidden over ranks in fp32, but reduce_dhidden=False leaves "
            "the sum over ranks to the caller; drop one of the two"
        )
    if options.schedule in ("cached", "in_forward") and options.smoothing_needs_logits:
        raise NotImplementedError(
            f"schedule='{options.schedule}' keeps exponentials, but label_smoothing with softcap "
            "needs the logits; use schedule='recompute'"
        )
    if not isinstance(options.schedule, str):
        options.schedule.refuse(options)
    return options


def check_tensors(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, **of_tokens: Tensor | None
) -> None:
    """Check types, devices and the shapes that do not depend on the group."""
    check_tensor("hidden", hidden, FLOATS)
    check_tensor("weight", weight, FLOATS, hidden)
    check_tensor("labels", labels, LABELS, hidden)
    check_shapes(hidden, weight)
    if bias is not None:
        check_tensor("bias", bias, FLOATS, hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias must be [V] with V = {weight.shape[0]} from weight, got {tuple(bias.shape)}"
                + ways_out.reshaped("bias", bias, weight.shape[:1])
            )
    check_one_dtype(hidden, weight=weight, bias=bias)
    for name, x in of_tokens.items():
        if x is None:
            continue
        check_tensor(name, x, FLOATS, hidden)
        if x.shape != labels.shape:
            way_out = ways_out.reshaped(name, x, labels.shape)
            if name == "temperature" and x.numel() == 1:
                way_out = ": pass float(temperature)"
            expected = tuple(labels.shape)
            got = tuple(x.shape)
            raise ValueError(f"{name} must be {expected}, as tokens, got {got}{way_out}")
        if x.requires_grad:
            raise ValueError(
                f"{name} must have requires_grad=False, since it gets no gradient, got True: pass "
                f"{name}.detach()"
            )


def check_shapes(hidden: Tensor, weight: Tensor) -> None:
    """Check that weight is [V, H] for hidden [..., H]."""
    if hidden.dim() < 1 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., H] with H >= 1, got {tuple(hidden.shape)}")
    H = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != H:
        way_out = ": pass weight.T" if weight.dim() == 2 and weight.shape[0] == H else ""
        raise ValueError(
            f"weight must be [V, H] with H = {H} from hidden, got {tuple(weight.shape)}{way_out}"
        )


def check_one_dtype(hidden: Tensor, **operands: Tensor | None) -> None:
    """Check that these have hidden's dtype, where they are given."""
    for name, x in operands.items():
        if x is not None and x.dtype != hidden.dtype:
            raise ValueError(
                f"{name} must have hidden's dtype {hidden.dtype}, got {x.dtype}: pass "
                f"{name}.to({hidden.dtype}) or hidden.to({x.dtype}), or call under torch.autocast; "
                "the gradient of each has the dtype that was passed"
            )


def check_tensor(
    name: str,
    x: object,
    dtypes: tuple[torch.dtype, ...],
    like: Tensor | None = None,
    name_of_like: str = "hidden",
) -> None:
    """Check that x is a dense tensor of one of the dtypes, on the device of ``like`` if given."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        layout = "a nested tensor" if x.is_nested else x.layout
        raise ValueError(f"{name} must be a dense tensor (torch.strided), got {layout}")
    if x.dtype not in dtypes:
        got = f"{x.dtype}{ways_out.converted(name, x, dtypes)}"
        raise ValueError(f"{name} must have dtype {values.either(dtypes)}, got {got}")
    if x.device.type == "meta":  # torch.compile's fakes name the device that they stand for
        raise ValueError(f"{name} must hold data, got a tensor on device meta")
    if like is not None and x.device != like.device:
        raise ValueError(
            f"{name} must be on {name_of_like}'s {like.device}, got {x.device}: pass "
            f"{name}.to({name_of_like}.device)"
        )


def check_group(
    tp_group: dist.ProcessGroup | None, sequence_parallel: bool, name: str = "tp_group"
) -> None:
    if tp_group is None and sequence_parallel:
        raise ValueError("sequence_parallel=True needs a tp_group, got tp_group=None")
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        way_out = f": pass {name}.get_group()" if hasattr(tp_group, "get_group") else ""
        raise ValueError(
            f"{name} must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
            f"got {values.shown(tp_group)}{way_out}"
        )


def check_tokens(hidden: Tensor, labels: Tensor, options: LossOptions, P: int) -> None:
    """Check labels' shape against hidden's: under sequence_parallel labels are of all tokens."""
    expected = list(hidden.shape[:-1])
    dim = options.sequence_dim
    hint = ""
    if options.sequence_parallel:
        if hidden.dim() < 2 + dim:
            shape = "[B, S / P, ..., H] with sequence_dim=1" if dim else "[T / P, ..., H]"
            raise ValueError(
                f"hidden must be {shape} under sequence_parallel=True, got {tuple(hidden.shape)}"
            )
        expected[dim] *= P
        hint = f" for the tokens of all {P} ranks"
    if list(labels.shape) != expected:
        hint += f", got {tuple(labels.shape)}"
        if options.sequence_parallel and dim == 0 and max(hidden.dim() - 1, labels.dim()) > 1:
            hint += (
                "; pass hidden [B, S / P, H], split along dimension 1, and labels [B, S] with "
                "sequence_dim=1, since flattening would give tokens other labels"
            )
        if not options.sequence_parallel:
            split = ways_out.split_tokens(labels, expected, P)
            hint += split or ways_out.reshaped("labels", labels, expected)
        raise ValueError(
            f"labels must be {tuple(expected)} from hidden {tuple(hidden.shape)}{hint}"
        )


def check_rows(V: int, options: LossOptions, *, P: int, rank: int) -> None:
    vocab_size = options.vocab_size
    if options.vocab_range is None:
        if V == 0:
            raise ValueError("weight must have at least one row without vocab_range, got V = 0")
        if vocab_size is not None and not 1 <= vocab_size <= V * P:
            hint = (
                ": tp_group must be all ranks that share the vocabulary, and uneven shards need "
                "vocab_range"
            )
            raise ValueError(
                f"vocab_size must be within [1, {V * P}], the rows of {P} shards of {V}, "
                f"got {vocab_size}" + (hint if P > 1 else "")
            )
        return
    start, end = options.vocab_range
    if vocab_size is None:
        raise ValueError(
            "vocab_size must be given with vocab_range, since one rank's rows do not determine it, "
            "got None"
        )
    if start < 0 or end - start != V:
        raise ValueError(
            f"vocab_range must be half-open (start, end) with end - start = {V} from weight, "
            f"got {options.vocab_range}"
        )
    if (rank == 0 and start != 0) or (rank == P - 1 and end < vocab_size):
        raise ValueError(
            f"vocab_range of the {P} ranks must cover [0, {vocab_size}), "
            f"got {options.vocab_range} on rank {rank}"
        )


def check_invariant(impl: str, shards: Iterable[tuple[int, int]]) -> None:
    """Check what tp_invariant=True requires of the kernels and of all shards that a rank knows."""
    if impl != "triton":
        raise NotImplementedError(
            f"tp_invariant=True needs impl='triton', which sums in a fixed order, got {impl!r}"
        )
    for start, end in shards:
        if start < end and start % INVARIANT_ROWS:
            raise ValueError(
                f"vocabulary rows of each rank must begin at a multiple of {INVARIANT_ROWS} under "
                f"tp_invariant=True, got {start}: pad the weight, or cut it by vocab_range"
            )


def check_impl(impl: str, hidden: Tensor) -> None:
    if impl != "triton":
        return
    if hidden.dtype == torch.float64:
        raise NotImplementedError(
            "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: "
            "use impl='eager'"
        )
    import triton

    if triton.knobs.runtime.interpret:
        return
    if not hidden.is_cuda:
        raise NotImplementedError(
            f"impl='triton' needs a CUDA device, hidden is on {hidden.device}: use impl='eager' "
            "(or set TRITON_INTERPRET=1 before Python starts, for tests of the kernels)"
        )
    if torch.version.hip:
        raise NotImplementedError(
            "impl='triton' has kernels for NVIDIA GPUs only, this PyTorch is built for ROCm "
            f"{torch.version.hip}: use impl='eager'"
        )
    major, minor = torch.cuda.get_device_capability(hidden.device)
    if major < 8:
        raise NotImplementedError(
            f"impl='triton' needs compute capability 8.0 or newer, {hidden.device} has "
            f"{major}.{minor}: use impl='eager'"
        )


def check_labels(
    labels: Tensor,
    token_weight: Tensor | None,
    inverse: Tensor | None,
    vocab_size: int,
    options: LossOptions,
    *,
    P: int,
) -> None:
    """Check that the [T] labels that count are in the vocabulary, and are at most max_counted.

    ``token_weight`` says which count if a weight of 0 is no token.
    Also their temperatures, of which ``inverse`` is NaN where they are not above 0. On a GPU, for
    which the host must not wait, ``logits_at_ids`` and ``counted_tokens`` assert it.
    """
    if labels.is_cuda:
        return
    ignore_index = options.ignore_index
    most = options.max_counted
    counted = labels != ignore_index
    if token_weight is not None:
        counted &= token_weight != 0
    if most is not None and (n := int(counted.sum())) > most:
        raise ValueError(f"max_counted must be at least the {n} tokens that count, got {most}")
    bad = (((labels < 0) | (labels >= vocab_size)) & counted).to(torch.uint8)
    if bad.any():
        where = int(bad.argmax())
        label = int(labels[where])
        hint = (
            f": weight has {vocab_size} rows on the {P} ranks of tp_group together, which must be "
            "all ranks that share the vocabulary"
        )
        is_beyond_all_rows = P > 1 and label >= vocab_size and options.vocab_size is None
        raise ValueError(
            f"labels must be within [0, {vocab_size}) or ignore_index {ignore_index}, "
            f"got {label} at token {where}" + (hint if is_beyond_all_rows else "")
        )
    if inverse is not None:
        check_temperatures(inverse, counted)


def check_temperatures(inverse: Tensor, counted: Tensor) -> None:
    """Check that no token that counts, [T] bool, has NaN for one over its temperature."""
    bad = (inverse.isnan() & counted).to(torch.uint8)
    if bad.any():
        raise ValueError(
            "temperature must be above 0 for each token that counts, got 0, a negative number or "
            f"NaN at token {int(bad.argmax())}"
        )
