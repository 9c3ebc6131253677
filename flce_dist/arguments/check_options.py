"""Checks of options: of one another, of a shard's rows, of the kernels.

Errors name the argument, what is expected and what was given. Single values are ``values``' part.
"""

from collections.abc import Iterable

import torch

from flce_dist.arguments import values
from flce_dist.arguments.options import LossOptions
from flce_dist.core.call import Needs
from flce_dist.parallel.vocab import INVARIANT_ROWS


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
    if options.schedule in ("cached", "in_forward") and options.smoothing_is_capped:
        raise NotImplementedError(
            f"schedule='{options.schedule}' keeps exponentials, but label_smoothing with softcap "
            "needs the logits; use schedule='recompute'"
        )
    if not isinstance(options.schedule, str):
        options.schedule.refuse(options)
    return options


def check_rows(V: int, options: LossOptions, *, P: int, rank: int) -> None:
    """Check vocab_size and vocab_range against the V rows of this rank of P."""
    vocab_size = options.vocab_size
    if options.vocab_range is None:
        if V == 0:
            raise ValueError("weight must have at least one row without vocab_range, got V = 0")
        if vocab_size is not None and not 1 <= vocab_size <= V * P:
            hint = (
                f": {options.group_name} must be all ranks that share the vocabulary, and uneven "
                "shards need vocab_range"
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
    check_range(options.vocab_range, V)
    if (rank == 0 and start != 0) or (rank == P - 1 and end < vocab_size):
        raise ValueError(
            f"vocab_range of the {P} ranks must cover [0, {vocab_size}), "
            f"got {options.vocab_range} on rank {rank}"
        )


def check_range(vocab_range: tuple[int, int], V: int) -> None:
    """Check that the range has the V rows of weight."""
    start, end = vocab_range
    if start < 0 or end - start != V:
        raise ValueError(
            f"vocab_range must be half-open (start, end) with end - start = {V} from weight, "
            f"got {vocab_range}"
        )


def known_shards(V: int, options: LossOptions, *, P: int) -> list[tuple[int, int]]:
    """Return the vocabulary rows (start, end) of the shards that a rank knows, of V rows here."""
    if options.vocab_range is not None:
        return [options.vocab_range]
    return [(rank * V, (rank + 1) * V) for rank in range(P)]


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


def check_compiled(options: LossOptions, needs: Needs) -> None:
    """Check that torch.compile's operators can do this."""
    if options.accumulate_dweight and needs.weight:
        raise NotImplementedError(
            "accumulate_dweight=True is not supported under torch.compile, whose operators must "
            "not change their inputs; exclude the call by torch.compiler.disable"
        )
    of_loss_only = options.schedule not in ("auto", "recompute", "cached")
    if options.with_metrics and of_loss_only and any(needs):
        schedule = options.schedule
        shown = repr(schedule) if isinstance(schedule, str) else schedule.name
        # Compiled code passes zeros for upstream gradients that do not exist.
        raise NotImplementedError(
            "under torch.compile linear_cross_entropy_with_metrics takes "
            f"schedule={shown} only without gradients; use schedule='recompute', or exclude the "
            "call by torch.compiler.disable"
        )


def check_impl(impl: str, dtype: torch.dtype, device: torch.device | None) -> None:
    """Check that the implementation has this dtype, and runs on this device if that is known."""
    if impl != "triton":
        return
    if dtype == torch.float64:
        raise NotImplementedError(
            "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: "
            "use impl='eager'"
        )
    if device is None:
        return
    import triton

    if triton.knobs.runtime.interpret:
        return
    if device.type != "cuda":
        raise NotImplementedError(
            f"impl='triton' needs a CUDA device, hidden is on {device}: use impl='eager' "
            "(or set TRITON_INTERPRET=1 before Python starts, for tests of the kernels)"
        )
    if torch.version.hip:
        raise NotImplementedError(
            "impl='triton' has kernels for NVIDIA GPUs only, this PyTorch is built for ROCm "
            f"{torch.version.hip}: use impl='eager'"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise NotImplementedError(
            f"impl='triton' needs compute capability 8.0 or newer, {device} has "
            f"{major}.{minor}: use impl='eager'"
        )
