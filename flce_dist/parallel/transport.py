"""How tokens travel: by copies between GPUs of one host, else by collectives.  P ranks."""

import os
import socket
from functools import partial
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
from flce_dist.parallel.counted import ChosenTokens, PutBackAndScattered, SumPutBack
from flce_dist.parallel.peers.copies import PeerGather, PeerScatter
from flce_dist.parallel.peers.driver import PeerDriver, number_of_set_up, refuse_capture
from flce_dist.parallel.peers.memory import PeerMemory
from flce_dist.torch_private.devices import shares_memory


def gather(x: Tensor, group: dist.ProcessGroup | None, places: Tensor | None = None) -> TokenGather:
    """Return the gather of [T / P, H] of every rank into [T, H], or of the tokens at ``places``."""
    if places is not None:
        return ChosenTokens(gather(x, group), places)
    if group is None:
        return TokenGather(x)
    memories = memories_of(group, x.device)
    return CollectiveGather(x, group) if memories is None else PeerGather(x, memories.hidden)


def token_sum(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool,
    places: Tensor | None = None,
    T_all: int = 0,
    out: Tensor | None = None,
) -> TokenSum:
    """Return the sum of [T, H] over ranks, with a buffer for this rank's share.

    Under ``sequence_parallel`` a rank gets the sum of its own [T / P, H], in ``out`` if that is
    given, else of all tokens. ``places`` are those of the share's tokens among ``T_all``, which the
    sum has; ``out`` is then None.
    """
    if places is None:
        return _sum_over_ranks(
            shape, dtype, device, group, sequence_parallel=sequence_parallel, out=out
        )
    assert out is None, "the sum of chosen tokens has a buffer of its own"
    if group is None or not sequence_parallel:
        of_chosen = _sum_over_ranks(
            shape, dtype, device, group, sequence_parallel=sequence_parallel
        )
        return SumPutBack(of_chosen, places, T_all)
    share = torch.empty(shape, dtype=dtype, device=device)
    of_all_tokens = T_all, shape[1]
    new_sum = partial(
        _sum_over_ranks, of_all_tokens, dtype, device, group, sequence_parallel=sequence_parallel
    )
    return PutBackAndScattered(share, places, new_sum)


def _sum_over_ranks(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool,
    out: Tensor | None = None,
) -> TokenSum:
    if group is None:
        return TokenSum(torch.empty(shape, dtype=dtype, device=device))
    memories = memories_of(group, device) if sequence_parallel else None
    if memories is not None:
        return PeerScatter(shape, dtype, memories.dhidden, out)
    share = torch.empty(shape, dtype=dtype, device=device)
    if sequence_parallel:
        return CollectiveScatter(share, group, out)
    return CollectiveSum(share, group)


class PeerMemories(NamedTuple):
    """One for each direction, so that writing one never waits for peers that read the other."""

    hidden: PeerMemory
    dhidden: PeerMemory


_memories: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, PeerMemories | None]] = {}


def memories_of(group: dist.ProcessGroup, device: torch.device) -> PeerMemories | None:
    """Return the memories that a group's ranks share, or None; hosts decide that together, once."""
    if device.type != "cuda":
        return None
    key = (group.group_name, device)
    owner, memories = _memories.get(key, (None, None))
    if owner is not group:  # unknown, or destroyed and its name used again
        refuse_capture(
            "the first call of a group under sequence parallelism",
            capturing=torch.cuda.is_current_stream_capturing(),
        )
        _forget_destroyed()
        memories = None
        if _all_reach_all(group, device):
            number = number_of_set_up(group)  # of both, as a rank may fail between them
            memories = PeerMemories(
                PeerMemory(PeerDriver(group, device, f"{number}/hidden"), "hidden states"),
                PeerMemory(PeerDriver(group, device, f"{number}/dhidden"), "shares of dhidden"),
            )
        _memories[key] = group, memories
    return memories


def shared_bytes() -> int:
    """Return the bytes that other GPUs of the host may read, outside PyTorch's allocator."""
    _forget_destroyed()
    return sum(memory.nbytes for _, pair in _memories.values() for memory in pair or ())


def release_shared_memory() -> None:
    """Free the memory that GPUs of this host read from each other under sequence parallelism.

    Otherwise it stays, at the size of the largest call so far. Memory that captured CUDA graphs use
    is kept until their process group is destroyed. All ranks of all such groups must call this;
    hosts wait for each other, and once more in the next call.
    """
    _forget_destroyed()
    for _, pair in _memories.values():
        for memory in pair or ():
            memory.release()


def _forget_destroyed() -> None:
    """Drop the memories of destroyed groups, including those that CUDA graphs used."""
    for key, (group, _) in list(_memories.items()):
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            _memories.pop(key, None)  # ranks may be threads


def _all_reach_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    if "cuda:nccl" not in dist.get_backend_config(group):
        return False
    gpus = [_gpu_name(i) for i in range(torch.cuda.device_count())]
    others = [i for i in range(len(gpus)) if i != device.index]
    host = socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text()
    reaches = {gpus[i]: torch.cuda.can_device_access_peer(device, i) for i in others}
    is_willing = (
        os.environ.get("FLCE_DIST_PEER_COPIES", "1") != "0"
        and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
        and shares_memory()
    )
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, (host, is_willing, gpus[device.index], reaches), group=group)
    hosts, are_willing, used, reached = zip(*of_ranks, strict=True)
    return (
        all(are_willing)
        and len(set(hosts)) == 1
        and len(set(used)) == len(used)
        # A rank cannot tell about a GPU that is not visible to it; access is then assumed.
        and all(access.get(gpu, True) for access in reached for gpu in used)
    )


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
