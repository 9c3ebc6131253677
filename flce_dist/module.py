"""An output layer with its loss, which owns one shard of the vocabulary.

V = rows here, V_all = true vocabulary, H = hidden size, P = tensor-parallel ranks.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flce_dist.api import (
    LossWithMetrics,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)
from flce_dist.op import checks, dtensor
from flce_dist.options import LossOptions, options_of
from flce_dist.order_checks import agreed_order, mismatch
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import vocab_range
from flce_dist.vocab_order import MAP, VocabOrder, as_vocab_order, row_of_id, rows_of

_MEGATRON_ATTRIBUTES = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
_BLOCK_ROWS = 64  # rows of the weight that are initialised together, from a seed of their own


def _normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, mean=0.0, std=0.02)


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` with its own weight, split by vocabulary over ``tp_group``.

    Rank r owns rows ``vocab_range(padded_vocab_size, r, P)``. Shards may be uneven, so neither the
    padding nor a checkpoint depends on P.

    Args:
        hidden_size: H.
        vocab_size: true size V_all of the whole vocabulary.
        bias: whether to add a bias, [V], initially 0, to the logits.
        padded_vocab_size: rows of the whole weight, at least ``vocab_size`` (the default). Rows
            beyond ``vocab_size`` are excluded from the loss and get a zero gradient.
        vocab_order: which token each row is of, for example by ``frequency_order``; the same on all
            ranks. Labels, ``ignore_index`` and gathered logits keep the tokenizer's ids; weight and
            bias have the new order. Default: row i is of token i.
        tp_group: ranks that share the vocabulary; None for one process.
        init_method: fills a CPU fp32 tensor [64, H] in place from the default random generator, as
            Megatron's do. It is called once per block of rows, so a row must not depend on the
            number of rows. Default: normal with standard deviation 0.02.
        device, dtype: of the parameters.
        **options: sequence_parallel, reduction, ignore_index, label_smoothing, z_loss_weight,
            softcap, logit_scale, reduce_dhidden, reduce_in_fp32, tp_invariant, accumulate_dweight,
            filter_eps, schedule, max_logits_bytes and impl, as in ``linear_cross_entropy``.

    The initial weight depends on the default CPU generator, not on P: if all ranks use one seed,
    shards are bitwise equal to the rows of the one-process weight. Parameters have Megatron's
    attributes ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.

    With a tp_group ``state_dict`` holds DTensors, so ``torch.distributed.checkpoint`` can save with
    one P and load with another. ``load_state_dict`` accepts such DTensors, this rank's rows, or
    whole parameters. ``copy.deepcopy`` shares the group. With a ``vocab_order`` the state dict also
    holds ``row_of_token`` [V_all], and rows of another order, or of none, are refused.

    FSDP2's ``fully_shard`` may shard each rank's rows again over a data-parallel mesh, also on the
    meta device (then call ``to_empty`` and ``reset_parameters``). It gathers them for ``forward``;
    call ``register_fsdp_forward_method`` for ``forward_with_metrics`` and ``logits``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    row_of_token: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        padded_vocab_size: int | None = None,
        vocab_order: VocabOrder | Tensor | None = None,
        tp_group: dist.ProcessGroup | None = None,
        init_method: Callable[[Tensor], Any] = _normal,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        chosen = options_of(
            LinearCrossEntropy.__init__, options, vocab_size=vocab_size, vocab_range=None
        )
        if padded_vocab_size is None:
            padded_vocab_size = vocab_size
        self.hidden_size = checks.count("hidden_size", hidden_size)
        self.vocab_size = checks.count("vocab_size", vocab_size)
        self.padded_vocab_size = checks.count("padded_vocab_size", padded_vocab_size)
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size must be at least vocab_size = {vocab_size}, "
                f"got {padded_vocab_size}"
            )
        checks.check_group(tp_group, chosen.sequence_parallel)
        self.tp_group, self.sequence_parallel = tp_group, chosen.sequence_parallel
        self.init_method = init_method
        self.P, self.rank = collectives.group_size(tp_group), collectives.group_rank(tp_group)
        self.vocab_range = vocab_range(self.padded_vocab_size, self.rank, self.P)
        self.options = checks.check_options(
            replace(chosen, vocab_size=self.vocab_size, vocab_range=self.vocab_range)
        )
        if self.options.tp_invariant:
            shards = [vocab_range(self.padded_vocab_size, rank, self.P) for rank in range(self.P)]
            checks.check_invariant(self.options.impl or "triton", shards)
        V = self.vocab_range[1] - self.vocab_range[0]
        self.weight = nn.Parameter(torch.empty(V, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(V, device=device, dtype=dtype)) if bias else None
        self._mark_parameters()

        def make_order() -> VocabOrder | None:
            return None if vocab_order is None else as_vocab_order(vocab_order, self.vocab_size)

        self.vocab_order = make_order() if self.weight.is_meta else self._agreed(make_order)
        rows, self._ignored_row = None, self.options.ignore_index
        if self.vocab_order is not None:
            rows = torch.empty_like(self.vocab_order.row_of_token, device=self.weight.device)
            self._ignored_row = row_of_id(self._ignored_row, self.vocab_order)
        self.register_buffer(MAP, rows)
        self._initialize()

    def reset_parameters(self) -> None:
        """Initialise the weight and zero the bias. Two all-reduces per group, of 8 and 16 bytes."""
        if not self.weight.is_meta:
            self._agreed(lambda: self.vocab_order)
            self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        if self.weight.is_meta:
            return
        if self.vocab_order is not None and self.row_of_token is not None:
            self.row_of_token.copy_(self.vocab_order.row_of_token)
        seed = self._shared_seed()
        state = torch.get_rng_state()
        weight, (rows, columns) = dtensor.local_part(self.weight)
        start, end = (self.vocab_range[0] + row for row in (rows.start, rows.stop))
        try:
            for first in range(start - start % _BLOCK_ROWS, end, _BLOCK_ROWS):
                # The odd multiplier gives every block another 32-bit seed. Only the CPU's
                # generator is seeded.
                torch.default_generator.manual_seed((seed + first * 0x9E3779B1) % 2**32)
                size = (_BLOCK_ROWS, self.hidden_size)
                block = torch.empty(size, dtype=torch.float32, device="cpu")
                self.init_method(block)
                low, high = max(first, start), min(first + _BLOCK_ROWS, end)
                weight[low - start : high - start] = block[low - first : high - first, columns]
        finally:
            torch.set_rng_state(state)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, hidden: Tensor, labels: Tensor, token_weight: Tensor | None = None) -> Tensor:
        """Return the loss; arguments and result are those of ``linear_cross_entropy``."""
        return linear_cross_entropy(
            hidden, self.weight, self._rows(labels), **self._arguments(token_weight)
        )

    def forward_with_metrics(
        self, hidden: Tensor, labels: Tensor, token_weight: Tensor | None = None
    ) -> LossWithMetrics:
        """Return a ``LossWithMetrics``."""
        return linear_cross_entropy_with_metrics(
            hidden, self.weight, self._rows(labels), **self._arguments(token_weight)
        )

    @torch.no_grad()
    def logits(self, hidden: Tensor, *, gather: bool = True) -> Tensor:
        """Return the logits for inference, in hidden's dtype and without a gradient.

        Args:
            hidden: as in ``forward``.
            gather: True returns [..., V_all] on every rank, by token id. False returns the columns
                of this rank's rows, [..., V] with padding, in the order of rows; only sequence
                parallelism then communicates.
        """
        group = self.tp_group
        if self.sequence_parallel:
            hidden = collectives.gather_tokens(hidden, group)
        scale, softcap = self.options.logit_scale, self.options.softcap
        z = F.linear(hidden, self.weight) * scale
        if self.bias is not None:
            z = z + self.bias
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        if not gather:
            return z
        # Only the last shards are shorter than the first, so padding them keeps ids in order.
        longest = vocab_range(self.padded_vocab_size, 0, self.P)[1]
        columns = F.pad(z, (0, longest - z.shape[-1])).movedim(-1, 0)
        columns = collectives.gather_tokens(columns, group)
        columns = columns[: self.vocab_size]
        if self.row_of_token is not None:
            columns = columns[self.row_of_token]
        return columns.movedim(0, -1)

    def _rows(self, labels: Tensor) -> Tensor:
        return labels if self.row_of_token is None else rows_of(labels, self.row_of_token)

    def extra_repr(self) -> str:
        start, end = self.vocab_range
        size = f"{self.vocab_size}"
        if self.padded_vocab_size != self.vocab_size:
            size += f" (padded to {self.padded_vocab_size})"
        parts = [
            f"hidden_size={self.hidden_size}",
            f"vocab_size={size}",
            f"rows=[{start}, {end}) of rank {self.rank}/{self.P}",
            f"bias={self.bias is not None}",
            f"sequence_parallel={self.sequence_parallel}",
        ]
        if self.vocab_order is not None:
            parts.append("vocab_order=True")
        shown = {"vocab_size", "vocab_range", "sequence_parallel"}
        for name, default in vars(LossOptions()).items():
            value = getattr(self.options, name)
            if name not in shown and value != default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)

    def _arguments(self, token_weight: Tensor | None) -> dict[str, Any]:
        options = dict(vars(self.options))
        del options["with_metrics"]  # not a keyword, see LossOptions
        options["ignore_index"] = self._ignored_row
        return dict(bias=self.bias, token_weight=token_weight, tp_group=self.tp_group, **options)

    def _groups(self) -> list[dist.ProcessGroup | None]:
        """The groups of all ranks that hold a part of the weight, one per dimension."""
        return [self.tp_group, *dtensor.groups_of(self.weight)]

    def _agreed(self, make: Callable[[], VocabOrder | None]) -> VocabOrder | None:
        return agreed_order(make, self.weight, self._groups())

    def _shared_seed(self) -> int:
        """Draw 32 bits from the default generator, the same on all ranks."""
        seed = torch.randint(2**32, (1,), dtype=torch.int64, device="cpu")
        for group in self._groups():
            seed = seed.to(collectives.message_device(self.weight, group))
            collectives.all_reduce_max(seed, group)
        return int(seed)

    def _mark_parameters(self) -> None:
        """Set Megatron's attributes, which are lost when a parameter is replaced."""
        for parameter in self.parameters():
            for name, value in _MEGATRON_ATTRIBUTES.items():
                setattr(parameter, name, value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "LinearCrossEntropy":
        super()._apply(fn, recurse)
        self._mark_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "LinearCrossEntropy":
        memo[id(self.tp_group)] = self.tp_group  # shared: connections cannot be copied
        copied = memo[id(self)] = self.__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied._mark_parameters()
        return copied

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.tp_group is None:
            return
        for name, parameter in self._parameters.items():
            if parameter is not None:
                destination[prefix + name] = dtensor.whole_of_rows(
                    destination[prefix + name], self.padded_vocab_size, self.tp_group
                )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        error_msgs: list[str] = args[-1]
        if any(prefix + name in state_dict for name in self._parameters):
            key = prefix + MAP
            problem = mismatch(state_dict.get(key), self.vocab_order, key)
            if problem is not None:
                error_msgs.append(problem)
                return
        state_dict = dict(state_dict)  # the caller's is not changed
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if parameter is not None and value is not None:
                state_dict[prefix + name] = self._own_part(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._mark_parameters()

    def _own_part(self, value: Any, parameter: nn.Parameter) -> Any:
        """Return this rank's part of a parameter's value; a value of a wrong size unchanged."""
        _, place = dtensor.local_part(parameter)
        rows, *rest = place
        start, shape = self.vocab_range[0], parameter.shape
        of_whole = (slice(start + rows.start, start + rows.stop), *rest)
        is_whole = value.shape == (self.padded_vocab_size, *shape[1:])
        if isinstance(value, DTensor):
            part, held = dtensor.local_part(value)
            known = is_whole and (held == of_whole or not part.numel())
        else:
            known = is_whole or value.shape == shape
            part = value[of_whole if is_whole else place] if known else value
        return dtensor.in_kind(part, parameter) if known else value
