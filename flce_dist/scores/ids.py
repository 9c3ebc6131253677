"""From a caller's ids to those of tokens in order: [T, K] or [N], and in either form offsets.

T = tokens on the tensor-parallel group, N = ids of all of them, K = ids of each if padded.
"""

import torch
from torch import Tensor

from flce_dist.arguments.check_tensors import check_tensor
from flce_dist.arguments.prepare import check_temperatures
from flce_dist.arguments.values import shape
from flce_dist.kernels.ids.token_ids import are_cut
from flce_dist.torch_private.devices import assert_soon

_INTEGERS = (torch.int64, torch.int32)


def ids_in_order(
    ids: Tensor, offsets: Tensor | None, tokens: torch.Size, hidden: Tensor, *, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return ids [T, K] or [N] and offsets [T + 1], int64, of tokens in order.

    ``tokens`` is the shape of a tensor of all tokens. With ``transposed`` their order is that of
    the second dimension, then the first. Shapes and dtypes are checked, not values.
    """
    check_tensor("ids", ids, _INTEGERS, hidden)
    T = tokens.numel()
    if offsets is None:
        if ids.dim() < 1 or ids.shape[:-1] != tokens:
            raise ValueError(
                f"ids must be {shape(*tokens, 'K')} from hidden {tuple(hidden.shape)}, or [N] with "
                f"offsets, got {tuple(ids.shape)}"
                + (": pass ids[..., None] for one id of each token" if ids.shape == tokens else "")
            )
        K = ids.shape[-1]
        device = ids.device
        ids = (ids.transpose(0, 1) if transposed else ids).reshape(T, K)
        offsets = torch.arange(0, (T + 1) * K, K, device=device) if K else ids.new_zeros(T + 1)
    else:
        check_tensor("offsets", offsets, _INTEGERS, hidden)
        if ids.dim() != 1 or offsets.shape != (T + 1,):
            raise ValueError(
                f"ids must be [N] and offsets [T + 1] with T = {T} tokens from hidden "
                f"{tuple(hidden.shape)}, got {tuple(ids.shape)} and {tuple(offsets.shape)}"
            )
        if transposed:
            raise NotImplementedError(
                "offsets need sequence_dim=0, since they are of tokens in order, got "
                "sequence_dim=1: pass hidden [S / P, B, H] or ids [B, S, K]"
            )
    return ids.long().contiguous(), offsets.long().contiguous()


def check_ids(ids: Tensor, offsets: Tensor, inverse: Tensor | None, vocab_size: int) -> None:
    """Check the values of ids and offsets in order, and the temperatures of tokens with ids.

    On a GPU, for which the host must not wait, offsets are asserted here, ids by ``set_scores`` and
    temperatures by ``logits_at_ids``.
    """
    if ids.is_cuda:
        assert_soon(are_cut(ids, offsets), "offsets must rise from 0 to all ids")
        return
    bad = (ids < -1) | (ids >= vocab_size)
    if bad.any():
        where = int(bad.to(torch.uint8).argmax())
        raise ValueError(
            f"ids must be within [0, {vocab_size}), or -1 for padding, "
            f"got {int(ids.flatten()[where])} at place {where}"
        )
    if not are_cut(ids, offsets):
        got = f"{int(offsets[0])} to {int(offsets[-1])}"
        falls = (offsets.diff() < 0).nonzero().flatten().tolist()
        if falls:
            got = f"{offsets[falls[0] : falls[0] + 2].tolist()} at token {falls[0]}"
        raise ValueError(f"offsets must rise from 0 to the {len(ids)} ids, got {got}")
    if inverse is not None:
        named = (ids.view(-1) >= 0).cumsum(0)
        upto = torch.cat((named.new_zeros(1), named))[offsets]
        check_temperatures(inverse, upto.diff() > 0)
