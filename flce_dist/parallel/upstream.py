"""Upstream gradients of data-parallel ranks, which must run backward of the same call.

T tokens of one rank, P ranks.
"""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel import collectives
from flce_dist.torch_private.devices import assert_soon

_WAY_OUT = (
    "a rank that skips backward of a loss, for example where it is not finite, must do so on all "
    "ranks of data_group"
)
_MOST_SERIALS = 1 << 20  # exact in fp32
_serials: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The serial number of each group's last call."""


def serial_of_call(data_group: dist.ProcessGroup | None) -> int:
    """Return the number of this call of a group; 0 in compiled code, where it would be constant."""
    if data_group is None or torch.compiler.is_compiling():
        return 0
    _serials[data_group] = _serials.get(data_group, 0) % _MOST_SERIALS + 1
    return _serials[data_group]


def upstream_of_mean(
    function: str, dloss: Tensor, serial: int, data_group: dist.ProcessGroup | None
) -> Tensor:
    """Return the gradient of the mean over ranks, from that of this rank's loss or tokens [P T].

    Ranks send the serial number of their call behind it: [2], or [T + 1].
    """
    P = collectives.group_size(data_group)
    rank = collectives.group_rank(data_group)
    own = dloss.view(P, dloss.numel() // P)[rank] if dloss.dim() else dloss[None]  # others' are 0
    message = torch.cat((own, own.new_full((1,), serial)))
    try:
        messages = collectives.gather_tokens(message, data_group).view(P, len(message))
    except RuntimeError as error:
        raise RuntimeError(f"{function}: ranks did not meet in backward; {_WAY_OUT}") from error
    upstream = messages[:, :-1]
    serials = messages[:, -1]
    if serial:
        words = f"{function}: ranks run backward of different calls; {_WAY_OUT}"
        assert_soon((serials == serial).all(), words)
    if dloss.dim():
        return upstream.reshape(-1) / P
    return dloss.where((upstream == dloss).all(), torch.nan) / P
