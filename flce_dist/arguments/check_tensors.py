"""Checks of tensors by their metadata; errors name the argument, what is expected and given."""

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments import values, ways_out
from flce_dist.arguments.options import LossOptions

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LABELS = (torch.int64, torch.int32)
OF_GRADIENTS = "; the gradient of each has the dtype that was passed"
"""What a complaint about dtypes ends with, unless its tensors get no gradient."""


def check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Check types, devices and the shapes that do not depend on the group."""
    check_tensor("hidden", hidden, FLOATS)
    check_tensor("weight", weight, FLOATS, hidden)
    check_tensor("labels", labels, LABELS, hidden)
    check_shapes(hidden, weight)
    check_bias(bias, weight, hidden)
    check_one_dtype(hidden, weight=weight, bias=bias)


def check_numbers(hidden: Tensor, labels: Tensor, **of_tokens: Tensor | None) -> None:
    """Check tensors of a number for each token, whose shape is that of labels, checked before."""
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


def check_bias(bias: Tensor | None, weight: Tensor, hidden: Tensor) -> None:
    """Check that bias, if there is one, is [V] for weight [V, H]."""
    if bias is None:
        return
    check_tensor("bias", bias, FLOATS, hidden)
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be [V] with V = {weight.shape[0]} from weight, got {tuple(bias.shape)}"
            + ways_out.reshaped("bias", bias, weight.shape[:1])
        )


def check_shapes(hidden: Tensor, weight: Tensor) -> None:
    """Check that weight is [V, H] for hidden [..., H]."""
    if hidden.dim() < 1 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., H] with H >= 1, got {tuple(hidden.shape)}")
    H = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != H:
        raise ValueError(
            f"weight must be [V, H] with H = {H} from hidden, got {tuple(weight.shape)}"
            + ways_out.logits_or_transposed(hidden, weight)
        )


def check_one_dtype(hidden: Tensor, **operands: Tensor | None) -> None:
    """Check that these have hidden's dtype, where they are given."""
    for name, x in operands.items():
        if x is None or x.dtype == hidden.dtype:
            continue
        way_out = f"{name}.to({hidden.dtype}) or hidden.to({x.dtype}), or call under torch.autocast"
        if torch.is_autocast_enabled(hidden.device.type):
            wide = "hidden" if hidden.dtype == torch.float64 else name
            way_out = f"{wide}.float(), since torch.autocast casts no torch.float64"
        raise ValueError(
            f"{name} must have hidden's dtype {hidden.dtype}, got {x.dtype}: pass {way_out}"
            + OF_GRADIENTS
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
        got = f"{type(x).__name__}{ways_out.as_tensor(name, x)}"
        raise ValueError(f"{name} must be a torch.Tensor, got {got}")
    if not is_dense(x):
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


def is_dense(x: Tensor) -> bool:
    """Whether x is neither nested nor sparse, so that its shape and strides say where it lies."""
    return not x.is_nested and x.layout == torch.strided


def check_group(
    tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool, name: str = "tp_group"
) -> None:
    """Check that it is None or a group, as the caller's argument ``name``."""
    if tp_group is None and sequence_parallel:
        raise ValueError("sequence_parallel=True needs a tp_group, got tp_group=None")
    if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):
        way_out = f": pass {name}.get_group()" if hasattr(tp_group, "get_group") else ""
        raise ValueError(
            f"{name} must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
            f"got {values.shown(tp_group)}{way_out}"
        )


def check_hidden_of_logits(hidden: Tensor, weight: Tensor, options: LossOptions) -> None:
    """Check hidden for logits alone, by the layer that owns weight [V, H]."""
    check_tensor("hidden", hidden, FLOATS, weight, "weight")
    H = weight.shape[1]
    if hidden.shape[-1:] != (H,):
        must = f"hidden must be [..., H] with H = {H} from weight"
        raise ValueError(f"{must}, got {tuple(hidden.shape)}")
    check_split(hidden, options)
    kind = hidden.device.type
    if dtype_in_autocast(hidden, kind) != dtype_in_autocast(weight, kind):
        way_out = f"hidden.to({weight.dtype}), or call under torch.autocast"
        if torch.is_autocast_enabled(kind):
            way_out = f"hidden.to({weight.dtype}), since torch.autocast casts no torch.float64"
        raise ValueError(
            f"hidden must have weight's dtype {weight.dtype}, got {hidden.dtype}: pass {way_out}"
        )


def dtype_in_autocast(x: Tensor, device_type: str) -> torch.dtype:
    """Return the dtype of operand x in a call on such a device."""
    takes_part = x.is_floating_point() and x.dtype != torch.float64
    is_on = takes_part and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else x.dtype


def check_split(hidden: Tensor, options: LossOptions) -> None:
    """Check that hidden has the dimension that ``sequence_parallel``, if it is on, splits."""
    dim = options.sequence_dim
    if options.sequence_parallel and hidden.dim() < 2 + dim:
        shape = "[B, S / P, ..., H] with sequence_dim=1" if dim else "[T / P, ..., H]"
        raise ValueError(
            f"hidden must be {shape} under sequence_parallel=True, got {tuple(hidden.shape)}"
        )


def check_tokens(hidden: Tensor, labels: Tensor, options: LossOptions, P: int) -> None:
    """Check labels' shape against hidden's: under sequence_parallel labels are of all tokens."""
    expected = list(hidden.shape[:-1])
    of_all = ""
    if options.sequence_parallel:
        check_split(hidden, options)
        expected[options.sequence_dim] *= P
        of_all = f" for the tokens of all {P} ranks"
    if list(labels.shape) == expected:
        return
    if options.sequence_parallel:
        way_out = ways_out.of_all_ranks(labels, hidden, expected, options.sequence_dim)
    else:
        way_out = ways_out.split_tokens(labels, expected, P)
        way_out = way_out or ways_out.reshaped("labels", labels, expected)
    raise ValueError(
        f"labels must be {tuple(expected)} from hidden {tuple(hidden.shape)}{of_all}, "
        f"got {tuple(labels.shape)}{way_out}"
    )
