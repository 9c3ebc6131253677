"""What ranks compare of a call: its facts, with hashes of its tensors.  Communicates nothing."""

import ctypes
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands

_NAMES_OF_LABELS = {"linear_logprob": "ids", "linear_sample": "counters"}
"""By the functions to which they are something else."""


def facts_of_call(
    function: str,
    call: Call,
    operands: Operands,
    low_rank_columns: int,
    more_values: Mapping[str, Tensor | None],
) -> dict[str, Any]:
    """Return this rank's facts about a call of the function, in the parts that are compared.

    ``more_values`` are tensors beside the operands that ranks must pass alike. The last
    ``low_rank_columns`` of hidden and weight are not the caller's own.
    """
    weight = operands.weight
    labels = operands.labels
    options = call.options
    start = call.vocab_start_index
    T, columns = operands.hidden.shape
    largest = int(labels.amax()) if labels.numel() else -1
    labels_are = _NAMES_OF_LABELS.get(function, "labels")
    return {
        "arguments": {
            "hidden.shape": [T, columns - low_rank_columns],
            "tokens": call.T_all,
            "dtype": str(call.dtype),
            "bias given": operands.bias is not None,
            "columns of low_rank": low_rank_columns,
            "low_rank trained alone": operands.last_columns is not None,
            "token_weight given": operands.token_weight is not None,
            "temperature given": operands.inverse_temperature is not None,
            **{f"{name}.requires_grad": x for name, x in call.needs._asdict().items()},
            **{name: x for name, x in vars(options).items() if name != "vocab_range"},
            "vocab_range given": options.vocab_range is not None,
            "impl": call.impl,
            "rows of weight": len(weight) if options.vocab_range is None else None,
        },
        "rows": [min(row, call.vocab_size) for row in (start, start + len(weight))],
        "values": {
            f"hash of {labels_are}": _hash(labels, operands.offsets),
            "hash of token_weight": _hash(operands.token_weight),
            "hash of temperature": _hash(operands.inverse_temperature),
            **{f"hash of {name}": _hash(x) for name, x in more_values.items()},
        },
        "plan": {"plan": repr(call.schedule)},
        "weight": (len(weight), _hash_of_rows(weight), largest),
    }


def _hash(*tensors: Tensor | None) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for x in (x.cpu().contiguous() for x in tensors if x is not None):
        digest.update(ctypes.string_at(x.data_ptr(), x.nbytes))
    return digest.hexdigest()


def _hash_of_rows(weight: Tensor) -> str | None:
    """Return the hash of 16 rows spread over ``weight``; None if all elements are equal.

    Constant shards, such as zeros before a checkpoint is loaded, are legitimately the same.
    """
    V = len(weight)
    if V == 0:
        return None
    sample = weight.detach()[torch.arange(16, device=weight.device) * V // 16]
    return None if (sample == sample[0, 0]).all() else _hash(sample)
