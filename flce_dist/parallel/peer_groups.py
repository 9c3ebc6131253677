"""Which groups copy by their GPUs' copy engines, and the memories that they share."""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flce_dist.parallel.peer_driver import PeerDriver, refuse_capture
from flce_dist.parallel.peer_memory import PeerMemory


class PeerMemories(NamedTuple):
    """One for each direction, so that neither waits for what peers still read of the other."""

    hidden: PeerMemory
    dhidden: PeerMemory


_memories: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, PeerMemories | None]] = {}


def of_group(group: dist.ProcessGroup, device: torch.device) -> PeerMemories | None:
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
