"""Whether all ranks, and a checkpoint, have one ``vocab_order``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered.vocab_order import VocabOrder
from flce_dist.parallel import collectives
from flce_dist.rank_check import on_ranks

_DIGESTS = 1 << 62
_NO_ORDER, _ERROR = _DIGESTS, _DIGESTS + 1
"""What a rank without an order sends in place of a digest, and one whose order is invalid."""


def agreed_order(
    make: Callable[[], VocabOrder | None],
    like: Tensor,
    groups: Iterable[dist.ProcessGroup | None],
) -> VocabOrder | None:
    """Return what ``make`` does, without collectives, if it does the same on all ranks.

    ``groups`` are the dimensions of a mesh of ranks, ``like`` is on the device of their
    collectives: an all-reduce of 16 bytes each; only a difference lets the reasons be gathered.

    Raises:
        ValueError: the same on all ranks. It names what each has, and its error if ``make`` raised.
        Exception: what ``make`` raised, if it did so on all ranks and with one message.
    """
    order, failure, mine = None, None, _ERROR
    try:
        order = make()
        mine = _digest(order)
    except Exception as error:  # of any type: other ranks wait for this one
        failure = error
    meshed = [group for group in groups if group is not None]
    extremes = torch.tensor([mine, -mine], device="cpu")
    for group in meshed:
        extremes = extremes.to(collectives.message_device(like, group))
        collectives.all_reduce_max(extremes, group)
    largest, smallest = extremes[0].item(), -extremes[1].item()
    if largest == smallest != _ERROR:
        return order
    text = "None" if order is None else f"order {mine:x}"
    if failure is not None:
        text = f"an invalid one ({failure})"
    with torch.cuda.device_of(like):  # from which NCCL sends
        everyones = _gathered(text, meshed)
    if failure is not None and len(set(everyones)) == 1:
        raise failure
    raise ValueError(
        f"vocab_order must be the same on all ranks, got {on_ranks(everyones)}"
    ) from failure


def _digest(order: VocabOrder | None) -> int:
    if order is None:
        return _NO_ORDER
    factors = torch.arange(1, 2 * len(order.row_of_token), 2, device="cpu") * 0x9E3779B1
    return int((order.row_of_token * factors).sum()) % _DIGESTS


def _gathered(text: str, groups: list[dist.ProcessGroup]) -> list[str]:
    texts = {dist.get_rank(): text} if groups else {0: text}
    for group in groups:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, texts, group=group)
        texts = {rank: text for part in parts for rank, text in part.items()}
    return [texts[rank] for rank in sorted(texts)]


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
