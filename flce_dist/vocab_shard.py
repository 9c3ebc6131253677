"""The parameters of an output layer of which each rank holds a shard of the vocabulary.

V = rows here, H = hidden size, P = tensor-parallel ranks.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flce_dist import optimizer_state, state_dtensors
from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import vocab_range
from flce_dist.torch_private.modes import FakeTensor

_MEGATRON_ATTRIBUTES = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
_BLOCK_ROWS = 64  # rows of the weight that are initialised together, from a seed of their own


class VocabShard(nn.Module):
    """Weight [V, H] and bias [V] of this rank: initial values and state dicts.

    ``LinearCrossEntropy`` explains the arguments and is its face.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool,
        padded_vocab_size: int | None,
        tp_group: dist.ProcessGroup | None,
        init_method: Callable[[Tensor], Any],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make the parameters and initialise them, unless they hold no data; collective."""
        super().__init__()
        padded_vocab_size = vocab_size if padded_vocab_size is None else padded_vocab_size
        self.hidden_size = values.count("hidden_size", hidden_size)
        self.vocab_size = values.count("vocab_size", vocab_size)
        self.padded_vocab_size = values.count("padded_vocab_size", padded_vocab_size)
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size must be at least vocab_size = {vocab_size}, "
                f"got {padded_vocab_size}"
            )
        values.flag("bias", bias)
        if not callable(init_method):
            raise ValueError(f"init_method must be a function, got {values.shown(init_method)}")
        if dtype not in (None, *FLOATS):
            raise ValueError(f"dtype must be None or {values.either(FLOATS)}, got {dtype}")
        self.tp_group = tp_group
        self.init_method = init_method
        self.P = collectives.group_size(tp_group)
        self.rank = collectives.group_rank(tp_group)
        self.vocab_range = vocab_range(self.padded_vocab_size, self.rank, self.P)
        V = self.vocab_range[1] - self.vocab_range[0]
        self.weight = nn.Parameter(torch.empty(V, self.hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(V, device=device, dtype=dtype)) if bias else None
        self._mark_parameters()
        if tp_group is not None:
            optimizer_state.watch(self)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weight and zero the bias. An all-reduce per group."""
        if self.weight.is_meta or isinstance(self.weight, FakeTensor):
            return
        seed = self._shared_seed()
        weight, (rows, columns) = state_dtensors.local_part(self.weight)
        start, end = (self.vocab_range[0] + row for row in (rows.start, rows.stop))
        with torch.random.fork_rng(devices=[]):
            for first in range(start - start % _BLOCK_ROWS, end, _BLOCK_ROWS):
                # The odd multiplier makes 32-bit seeds differ. Only the CPU's generator is seeded.
                torch.default_generator.manual_seed((seed + first * 0x9E3779B1) % 2**32)
                size = (_BLOCK_ROWS, self.hidden_size)
                block = torch.empty(size, dtype=torch.float32, device="cpu")
                self.init_method(block)
                low = max(first, start)
                high = min(first + _BLOCK_ROWS, end)
                weight[low - start : high - start] = block[low - first : high - first, columns]
        if self.bias is not None:
            self.bias.zero_()

    def _shared_seed(self) -> int:
        """Draw 32 bits from the default generator, the same on all ranks."""
        seed = torch.randint(2**32, (1,), dtype=torch.int64, device="cpu")
        for group in (self.tp_group, *state_dtensors.groups_of(self.weight)):
            seed = seed.to(collectives.message_device(self.weight, group))
            collectives.all_reduce_max(seed, group)
        return int(seed)

    def _mark_parameters(self) -> None:
        """Set Megatron's attributes, which are lost when a parameter is replaced."""
        for parameter in self.parameters():
            vars(parameter).update(_MEGATRON_ATTRIBUTES)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "VocabShard":
        super()._apply(fn, recurse)
        self._mark_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "VocabShard":
        memo[id(self.tp_group)] = self.tp_group  # shared: connections cannot be copied
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied._mark_parameters()
        if copied.tp_group is not None:
            optimizer_state.watch(copied)
        return copied

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tp_group is None:
            return
        for name, _ in self.named_parameters(recurse=False):
            destination[prefix + name] = state_dtensors.whole_of_rows(
                destination[prefix + name], self.padded_vocab_size, self.tp_group
            )

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        assigns = local_metadata.get("assign_to_params_buffers", False)
        state_dict = dict(state_dict)  # the caller's is not changed
        for name, parameter in self.named_parameters(recurse=False):
            if (value := state_dict.get(prefix + name)) is not None:
                part = self.own_part(value, parameter)
                is_cut = state_dtensors.local_part(part)[0].numel() < value.numel()
                if assigns and is_cut and not isinstance(value, DTensor):
                    part = part.clone()  # which does not keep the whole in memory
                state_dict[prefix + name] = part
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        self._mark_parameters()

    def own_part(self, value: Any, parameter: nn.Parameter) -> Any:
        """Return this rank's part of a parameter's value; a value of a wrong size unchanged."""
        _, place_in_shard = state_dtensors.local_part(parameter)  # all, unless FSDP2 cuts it again
        rows, *columns = place_in_shard
        start = self.vocab_range[0]
        place_in_whole = (slice(start + rows.start, start + rows.stop), *columns)
        is_whole = value.shape == (self.padded_vocab_size, *parameter.shape[1:])
        if isinstance(value, DTensor):
            part, place = state_dtensors.local_part(value)
            fits = is_whole and (place == place_in_whole or not part.numel())
        else:
            fits = is_whole or value.shape == parameter.shape
            part = value[place_in_whole if is_whole else place_in_shard] if fits else value
        return state_dtensors.in_kind(part, parameter) if fits else value
