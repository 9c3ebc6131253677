"""Whether all ranks, and a checkpoint, have one ``vocab_order``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered.vocab_order import VocabOrder
from flce_dist.rank_check import hash_of, on_ranks


def agreed_order(
    make: Callable[[], VocabOrder | None], like: Tensor, groups: Iterable[dist.ProcessGroup | None]
) -> VocabOrder | None:
    """Return what ``make`` does, without collectives, if it does the same on all ranks.

    ``groups`` are the dimensions of a mesh of ranks, and ``like`` is on the device from which they
    send. Each gathers what its ranks have.

    Raises:
        ValueError: the same on all ranks. It names what each has, and its error if ``make`` raised.
        Exception: what ``make`` raised, if it did so on all ranks and with one message.
    """
    order, failure = None, None
    try:
        order = make()
        text = "None" if order is None else f"order {hash_of(order.row_of_token)}"
    except Exception as error:  # of any type: other ranks wait for this one
        failure, text = error, f"an invalid one ({error})"
    meshed = [group for group in groups if group is not None]
    texts = {dist.get_rank() if meshed else 0: text}
    with torch.cuda.device_of(like):
        for group in meshed:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, texts, group=group)
            texts = {rank: text for part in parts for rank, text in part.items()}
    if len(set(texts.values())) > 1:
        everyones = [texts[rank] for rank in sorted(texts)]
        raise ValueError(
            f"vocab_order must be the same on all ranks, got {on_ranks(everyones)}"
        ) from failure
    if failure is not None:
        raise failure
    return order


def mismatch(saved: Any, own: VocabOrder | None, key: str) -> str | None:
    """Return why rows of a checkpoint with ``saved`` as its ``key`` may not be loaded, or None."""
    convert = "convert the checkpoint by python -m flce_dist.launch.vocab_order convert --to"
    made_alike = f"vocab_order=checkpoint[{key!r}].argsort()"
    if saved is None and own is None:
        return None
    if saved is None:
        return (
            f"the checkpoint has no {key}, so its rows are in the tokenizer's order, but this "
            f"layer has a vocab_order; {convert} ordered"
        )
    if own is None:
        return (
            f"the checkpoint's rows have a vocab_order ({key}), but this layer has none; pass "
            f"{made_alike}, or {convert} plain"
        )
    if torch.equal(saved.cpu(), own.row_of_token):
        return None
    return (
        f"the checkpoint's rows have another vocab_order ({key}) than this layer; make the layer "
        f"with {made_alike}"
    )
