"""How tokens travel between ranks: by copies within a host that allows it, else by collectives.

P ranks, T tokens, H hidden size. This module alone decides which, the same
on all ranks of a group.
"""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel.collectives import (
    CollectiveGather,
    CollectiveScatter,
    CollectiveSum,
    TokenGather,
    TokenSum,
)
from flce_dist.parallel.peer_copies import PeerGather, PeerScatter
from flce_dist.parallel.peer_driver import PeerDriver, refuse_capture
from flce_dist.parallel.peer_memory import PeerMemory
from flce_dist.parallel.token_order import TokenOrder


def gather(x: Tensor, order: TokenOrder, group: dist.ProcessGroup | None) -> TokenGather:
    """Return what gathers [T / P, H] of every rank into [T, H]; without a group ``x`` is whole."""
    if group is None:
        return TokenGather(x, order)
    memories = memories_of(group, x.device)
    if memories is not None:
        return PeerGather(x, order, memories.hidden)
    return CollectiveGather(x, order, group)


def token_sum(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    order: TokenOrder,
    group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool,
) -> TokenSum:
    """Return what sums [T, H] over ranks, with a buffer for what this rank adds.

    Under ``sequence_parallel`` a rank gets the sum of its own [T / P, H], else of all tokens.
    """
    if group is None or not sequence_parallel:
        share = torch.empty(shape, dtype=dtype, device=device)
        return TokenSum(share) if group is None else CollectiveSum(share, group)
    memories = memories_of(group, device)
    if memories is not None:
        return PeerScatter(shape, dtype, order, memories.dhidden)
    return CollectiveScatter(torch.empty(shape, dtype=dtype, device=device), order, group)


class PeerMemories(NamedTuple):
    """One for each direction, so that neither waits for what peers still read of the other."""

    hidden: PeerMemory
    dhidden: PeerMemory


_memories: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, PeerMemories | None]] = {}


def memories_of(group: dist.ProcessGroup, device: torch.device) -> PeerMemories | None:
    """Return the memories that a group's ranks share, or None if not all can read each other's.

    They can if they are processes of one host over NCCL, each with a GPU of its own that reaches
    the others', and no rank has ``NCCL_P2P_DISABLE=1`` in its environment. Asked once for a group,
    which is a collective that hosts wait for.
    """
    if device.type != "cuda" or dist.get_world_size(group) == 1:
        return None
    key = (group.group_name, device)
    asked, memories = _memories.get(key, (None, None))
    if asked is not group:
        refuse_capture(
            torch.cuda.is_current_stream_capturing(),
            "the first call of a group under sequence parallelism",
        )
        _forget_destroyed()
        memories = None
        if _all_reach_all(group, device):
            memories = PeerMemories(
                PeerMemory(PeerDriver(group, device), "hidden states"),
                PeerMemory(PeerDriver(group, device), "shares of dhidden"),
            )
        _memories[key] = group, memories
    return memories


def held_bytes() -> int:
    """Bytes of GPU memory that this process holds for its groups, beside PyTorch's own."""
    _forget_destroyed()
    return sum(memory.nbytes for _, both in _memories.values() for memory in both or ())


def release() -> None:
    """Give back what no CUDA graph uses. Every rank of each group must do so."""
    _forget_destroyed()
    for _, both in _memories.values():
        for memory in both or ():
            memory.release()


def _forget_destroyed() -> None:
    """Let go of memories of groups that are no more, also of what their CUDA graphs used."""
    for key, (group, _) in list(_memories.items()):
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            del _memories[key]


class _Site(NamedTuple):
    """Where a rank is, and which GPUs that it sees its own one reaches."""

    host: tuple[str, str]
    gpu: str
    reaches: dict[str, bool]
    willing: bool


def _all_reach_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    if "cuda:nccl" not in dist.get_backend_config(group):
        return False
    gpus = [_gpu_name(i) for i in range(torch.cuda.device_count())]
    others = [i for i in range(len(gpus)) if i != device.index]
    mine = _Site(
        host=(socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text()),
        gpu=gpus[device.index],
        reaches={gpus[i]: torch.cuda.can_device_access_peer(device, i) for i in others},
        willing=os.environ.get("NCCL_P2P_DISABLE", "0") == "0",
    )
    sites: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sites, mine, group=group)
    return (
        all(site.willing and site.host == mine.host for site in sites)
        and len({site.gpu for site in sites}) == len(sites)
        # Of a GPU that a rank does not see it cannot tell.
        and all(one.reaches.get(other.gpu, True) for one in sites for other in sites)
    )


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
