"""One process group for each set of ranks, whatever megatron-core wants it for.

It makes dozens for every layout, most of them of the same ranks, and each of gloo's has a thread
that wakes up a hundred times a second for as long as the group is there.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_groups: dict[tuple[int, ...], Any] = {}


def group_of(ranks: Sequence[int], **options: Any) -> Any:
    """Megatron's ``create_group``: collective at the first call for these ranks."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    members = tuple(ranks)
    if members not in _groups:
        _groups[members] = dist.new_group(members)
    return _groups[members]
