"""Every complaint about a caller's arguments: the argument, what was expected, what came.

All read host metadata only, but for ``check_labels``.
"""

import math
from collections.abc import Sequence
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.options import Impl, LossOptions, Reduction, Schedule
from flce_dist.vocab import INVARIANT_ROWS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_options(options: LossOptions, impl: str | None) -> None:
    """Check what does not depend on the tensors."""
    _one_of("reduction", options.reduction, get_args(Reduction))
    _one_of("schedule", options.schedule, get_args(Schedule))
    _one_of("impl", impl, (*get_args(Impl), None))
    _integer("ignore_index", options.ignore_index)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be within [0, 1], got {options.label_smoothing}")
    if not math.isfinite(options.z_loss_weight):
        raise ValueError(f"z_loss_weight must be finite, got {options.z_loss_weight}")
    if options.softcap is not None and not 0.0 < options.softcap < math.inf:
        raise ValueError(f"softcap must be None or positive and finite, got {options.softcap}")
    if not math.isfinite(options.logit_scale) or options.logit_scale == 0.0:
        raise ValueError(f"logit_scale must be finite and not 0, got {options.logit_scale}")
    if options.max_logits_bytes is not None:
        _integer("max_logits_bytes", options.max_logits_bytes)
        if options.max_logits_bytes <= 0:
            raise ValueError(
                f"max_logits_bytes must be None or positive, got {options.max_logits_bytes}"
            )
    if options.sequence_parallel and not options.reduce_dhidden:
        raise ValueError(
            "reduce_dhidden=False leaves the sum over ranks to the caller, but under "
            "sequence_parallel=True it is part of the reduce-scatter; drop one of the two"
        )
    if options.reduce_in_fp32 and not options.reduce_dhidden:
        raise ValueError(
            "reduce_in_fp32=True is how dhidden is summed over ranks, but reduce_dhidden=False "
            "leaves that to the caller; drop one of the two"
        )
    if options.schedule == "in_forward" and options.reduction == "none":
        raise NotImplementedError(
            "schedule='in_forward' knows one scalar upstream gradient, so reduction='none' needs "
            "schedule='recompute' or 'cached'"
        )
    if options.schedule in ("cached", "in_forward") and options.smoothing_needs_logits:
        raise NotImplementedError(
            f"schedule='{options.schedule}' keeps exponentials, which do not express "
            "label_smoothing with softcap; use schedule='recompute'"
        )


def check_tensors(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, token_weight: Tensor | None
) -> None:
    """Check types, devices and the shapes that one rank can judge."""
    for name, x in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        _tensor(name, x)
    if hidden.dtype not in _FLOATS:
        raise ValueError(f"hidden must be one of {_names(_FLOATS)}, got {hidden.dtype}")
    if hidden.dim() < 1 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., H] with H >= 1, got {tuple(hidden.shape)}")
    H = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != H:
        raise ValueError(
            f"weight must be [V, H] with H = {H} from hidden, got {tuple(weight.shape)}"
        )
    _same("weight", weight, hidden)
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be torch.int64 or torch.int32, got {labels.dtype}")
    if labels.device != hidden.device:
        raise ValueError(f"labels must be on hidden's {hidden.device}, got {labels.device}")
    if bias is not None:
        _tensor("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias must be [V] with V = {weight.shape[0]} from weight, got {tuple(bias.shape)}"
            )
        _same("bias", bias, hidden)
    if token_weight is not None:
        _tensor("token_weight", token_weight)
        if token_weight.shape != labels.shape:
            raise ValueError(
                f"token_weight must have labels' shape {tuple(labels.shape)}, "
                f"got {tuple(token_weight.shape)}"
            )
        if not token_weight.is_floating_point():
            raise ValueError(f"token_weight must be a float tensor, got {token_weight.dtype}")
        if token_weight.device != hidden.device:
            raise ValueError(
                f"token_weight must be on hidden's {hidden.device}, got {token_weight.device}"
            )
        if token_weight.requires_grad:
            raise ValueError(
                "token_weight has no gradient: it must have requires_grad=False, got True"
            )


def check_group(tp_group: dist.ProcessGroup | None, sequence_parallel: bool) -> None:
    """Check that this rank is a member of ``tp_group``."""
    if tp_group is None:
        if sequence_parallel:
            raise ValueError("sequence_parallel=True needs a tp_group, got tp_group=None")
        return
    if not isinstance(tp_group, dist.ProcessGroup):
        raise ValueError(
            "tp_group must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
            f"got {tp_group!r}"
        )


def check_parallel_shapes(
    hidden: Tensor,
    labels: Tensor,
    V: int,
    *,
    P: int,
    rank: int,
    sequence_parallel: bool,
    vocab_size: int | None,
    vocab_range: tuple[int, int] | None,
) -> None:
    """Check the shapes against the group: labels are whole on every rank, weight is a shard."""
    expected = tuple(hidden.shape[:-1])
    if sequence_parallel:
        if hidden.dim() < 2:
            raise ValueError(
                "hidden must be [T / P, ..., H] under sequence_parallel=True, "
                f"got {tuple(hidden.shape)}"
            )
        expected = (expected[0] * P, *expected[1:])
    if tuple(labels.shape) != expected:
        whole = f", the whole of {P} ranks' tokens" if sequence_parallel else ""
        raise ValueError(
            f"labels must be {expected} from hidden {tuple(hidden.shape)}{whole}, "
            f"got {tuple(labels.shape)}"
        )
    if vocab_size is not None:
        _integer("vocab_size", vocab_size)
    if vocab_range is None:
        if V == 0:
            raise ValueError("weight must have at least one row without vocab_range, got V = 0")
        if vocab_size is not None and not 1 <= vocab_size <= V * P:
            raise ValueError(
                f"vocab_size must be within [1, {V * P}], the rows of {P} shards of {V}, "
                f"got {vocab_size}"
            )
        return
    if not isinstance(vocab_range, Sequence) or len(vocab_range) != 2:
        raise ValueError(f"vocab_range must be (start, end), got {vocab_range!r}")
    start, end = vocab_range
    if vocab_size is None:
        raise ValueError(
            "vocab_size must be given with vocab_range: one rank's rows do not tell the whole, "
            "got None"
        )
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    if start < 0 or end - start != V:
        raise ValueError(
            f"vocab_range must be half-open (start, end) with end - start = {V} from weight, "
            f"got {vocab_range}"
        )
    if (rank == 0 and start != 0) or (rank == P - 1 and end < vocab_size):
        raise ValueError(
            f"vocab_range of the {P} ranks must cover [0, {vocab_size}), "
            f"got {vocab_range} on rank {rank}"
        )


def check_invariant(impl: str, start: int, end: int) -> None:
    """Check what tp_invariant=True asks of the kernels and of this rank's rows."""
    if impl != "triton":
        raise NotImplementedError(
            f"tp_invariant=True needs impl='triton', whose products have one order, got {impl!r}"
        )
    if start < end and start % INVARIANT_ROWS:
        raise ValueError(
            f"vocabulary rows of each rank must begin at a multiple of {INVARIANT_ROWS} under "
            f"tp_invariant=True, got {start}: pad the weight, or cut it by vocab_range"
        )


def check_impl(impl: str, hidden: Tensor) -> None:
    """Check that ``impl`` runs on this device and dtype."""
    if impl != "triton":
        return
    if hidden.dtype == torch.float64:
        raise NotImplementedError(
            "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: "
            "use impl='eager'"
        )
    import triton

    if not hidden.is_cuda and not triton.knobs.runtime.interpret:
        raise NotImplementedError(
            f"impl='triton' needs a CUDA device, hidden is on {hidden.device}: use impl='eager' "
            "(or set TRITON_INTERPRET=1 before Python starts, for tests of the kernels)"
        )


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Check that each of the [T] labels is a token of the vocabulary or ignored.

    Of labels on a GPU nothing is read, since the host must not wait: there the kernels assert it,
    see ``kernels.label_logit``.
    """
    if labels.is_cuda:
        return
    bad = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    if bad.any():
        where = int(bad.to(torch.uint8).argmax())
        raise ValueError(
            f"labels must be within [0, {vocab_size}) or ignore_index {ignore_index}, "
            f"got {int(labels[where])} at token {where}"
        )


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _integer(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise ValueError(f"{name} must be an int, got {value!r}")


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def _same(name: str, x: Tensor, hidden: Tensor) -> None:
    if x.dtype != hidden.dtype:
        raise ValueError(f"{name} must have hidden's dtype {hidden.dtype}, got {x.dtype}")
    if x.device != hidden.device:
        raise ValueError(f"{name} must be on hidden's {hidden.device}, got {x.device}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
