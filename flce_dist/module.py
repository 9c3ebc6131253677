"""An output layer with its loss, which owns one shard of the vocabulary.

V = rows here, V_all = true vocabulary, H = hidden size, P = tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from flce_dist.api import LossWithMetrics, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.arguments import values
from flce_dist.arguments.check_options import check_invariant
from flce_dist.arguments.check_tensors import check_bias, check_group, check_hidden_of_logits
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.dtensor import local_hidden
from flce_dist.arguments.options import KEYWORDS, LayerOptions, LossOptions, keywords_of
from flce_dist.arguments.rank_check import (
    check_facts_once,
    refusals_told,
    told_if_unbound,
)
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import vocab_range
from flce_dist.vocab_shard import VocabShard

_LOGITS = "LinearCrossEntropy.logits"


def _normal(weight: Tensor) -> Tensor:  # deep copies of the layer share a function
    return nn.init.normal_(weight, std=0.02)


class LinearCrossEntropy(VocabShard):
    """``linear_cross_entropy`` with its own weight, split by vocabulary over ``tp_group``.

    Rank r owns rows ``vocab_range(padded_vocab_size, r, P)``. Shards may be uneven, so neither the
    padding nor a checkpoint depends on P.

    Args:
        hidden_size: H.
        vocab_size: true size V_all of the whole vocabulary.
        bias: whether to add a bias, [V], initially 0, to the logits.
        padded_vocab_size: rows of the whole weight, at least ``vocab_size`` (the default). Rows
            beyond ``vocab_size`` are excluded from the loss and get a zero gradient.
        tp_group: ranks that share the vocabulary; None for one process.
        init_method: fills a CPU fp32 tensor [64, H] in place from the default random generator, as
            Megatron's do. It is called once per block of rows, so a row must not depend on the
            number of rows. Default: normal with standard deviation 0.02.
        device, dtype: of the parameters.
        **options: sequence_parallel, sequence_dim, reduction, ignore_index, label_smoothing,
            z_loss_weight, softcap, logit_scale, reduce_dhidden, reduce_in_fp32, tp_invariant,
            accumulate_dweight, schedule, max_logits_bytes, max_counted, skip_ignored and impl,
            as in ``linear_cross_entropy``.

    The initial weight depends on the default CPU generator, not on P: if all ranks use one seed,
    shards are bitwise equal to the rows of the one-process weight. Parameters have Megatron's
    attributes ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``; FSDP2's, which
    take their place, may lack them.

    With a tp_group ``state_dict`` holds DTensors, so ``torch.distributed.checkpoint`` can save with
    one P and load with another. ``load_state_dict`` accepts such DTensors, this rank's rows, or
    whole parameters. ``copy.deepcopy`` shares the group.

    So does ``state_dict`` of a ``torch.optim.Optimizer`` of its parameters, from the first step on:
    moments are saved with one P and loaded with another, too. Of a copied or unpickled optimizer,
    with which torch copies no hooks, it does from its own first step on. A state that is neither a
    number nor of its parameter's shape, such as Adafactor's, is refused there.

    FSDP2's ``fully_shard`` may shard each rank's rows again over a data-parallel mesh, also on the
    meta device (then call ``to_empty`` and ``reset_parameters``). It gathers them for ``forward``;
    call ``register_fsdp_forward_method`` for ``forward_with_metrics`` and ``logits``. Deep-copy the
    layer before it is sharded: FSDP2 refuses to copy what it has sharded. With a tp_group
    load whole parameters by ``load_state_dict``: torch's ``set_model_state_dict`` with
    ``full_state_dict=True`` cuts them over the data-parallel mesh alone, and raises.

    Example::

        layer = LinearCrossEntropy(64, 1000, tp_group=tp_group, sequence_parallel=False)
        loss = layer(hidden, labels)
        loss.backward()  # layer.weight.grad has this rank's rows
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        padded_vocab_size: int | None = None,
        tp_group: dist.ProcessGroup | None = None,
        init_method: Callable[[Tensor], Any] = _normal,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        of_shard = {"vocab_size": None, "vocab_range": None}  # known once it is made
        keywords = keywords_of(LinearCrossEntropy.__init__, options, **of_shard)
        checked = checked_options(**keywords)
        check_group(tp_group, sequence_parallel=checked.sequence_parallel)
        super().__init__(
            hidden_size,
            vocab_size,
            bias=bias,
            padded_vocab_size=padded_vocab_size,
            tp_group=tp_group,
            init_method=init_method,
            device=device,
            dtype=dtype,
        )
        if checked.tp_invariant:
            shards = [vocab_range(self.padded_vocab_size, rank, self.P) for rank in range(self.P)]
            check_invariant(checked.impl or "triton", shards)
        self.options = replace(checked, vocab_size=self.vocab_size, vocab_range=self.vocab_range)
        self.sequence_parallel = checked.sequence_parallel

    @partial(told_if_unbound, calls="linear_cross_entropy")
    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        token_weight: Tensor | None = None,
        temperature: float | Tensor = 1.0,
    ) -> Tensor:
        """Return the loss; arguments and result are those of ``linear_cross_entropy``."""
        arguments = self._arguments("linear_cross_entropy", hidden, labels, token_weight)
        return linear_cross_entropy(hidden, temperature=temperature, **arguments)

    @partial(told_if_unbound, calls="linear_cross_entropy_with_metrics")
    def forward_with_metrics(
        self,
        hidden: Tensor,
        labels: Tensor,
        token_weight: Tensor | None = None,
        temperature: float | Tensor = 1.0,
    ) -> LossWithMetrics:
        """Return a ``LossWithMetrics``."""
        function = "linear_cross_entropy_with_metrics"
        arguments = self._arguments(function, hidden, labels, token_weight)
        return linear_cross_entropy_with_metrics(hidden, temperature=temperature, **arguments)

    @torch.no_grad()
    def logits(self, hidden: Tensor, *, gather: bool = True) -> Tensor:
        """Return the logits for inference, in hidden's dtype, at temperature 1, without a gradient.

        Args:
            hidden: as in ``forward``, a DTensor, too.
            gather: True returns [..., V_all] on every rank. False returns the columns of this
                rank's rows, [..., V] with padding; only sequence parallelism then communicates.
        """
        group = self.tp_group
        with refusals_told(_LOGITS, group, hidden):
            hidden, options = local_hidden(hidden, self.options, group)
            weight = self._own_weight()
            bias = self.bias
            check_hidden_of_logits(hidden, weight, options)
            check_bias(bias, weight, hidden)
            values.flag("gather", gather)
        facts = {"hidden.shape": list(hidden.shape), "dtype": str(hidden.dtype), "gather": gather}
        check_facts_once(_LOGITS, facts, group, hidden)
        if self.sequence_parallel:
            dim = options.sequence_dim
            hidden = collectives.gather_tokens(hidden.transpose(0, dim), group).transpose(0, dim)
        z = self.options.logits_of(F.linear(hidden, weight), bias)
        if not gather:
            return z
        # Only the last shards are shorter than the first, so padding them keeps ids in order.
        longest = vocab_range(self.padded_vocab_size, 0, self.P)[1]
        columns = F.pad(z, (0, longest - z.shape[-1])).movedim(-1, 0)
        return collectives.gather_tokens(columns, group)[: self.vocab_size].movedim(0, -1)

    def extra_repr(self) -> str:
        start, end = self.vocab_range
        padded = self.padded_vocab_size
        more = f" (padded to {padded})" if padded != self.vocab_size else ""
        parts = [
            f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}{more}",
            f"rows=[{start}, {end}) of rank {self.rank}/{self.P}, bias={self.bias is not None}",
        ]
        options = {**vars(self.options), "vocab_size": None, "vocab_range": None}  # as shown above
        changed = {k: x for k, x in options.items() if x != getattr(LossOptions, k)}
        return ", ".join(parts + [f"{name}={x!r}" for name, x in changed.items()])

    def _own_weight(self) -> Tensor:
        """Return weight if it still has this rank's rows: another may be in its place.

        Once in each call: with ``torch.nn.utils.parametrize`` each use of it makes a new one.
        """
        start, end = self.vocab_range
        weight = self.weight
        if weight.shape[:-1] != (end - start,):
            raise ValueError(
                f"weight must be [V, H] with V = {end - start} rows of this rank, got "
                f"{tuple(weight.shape)}: make a LinearCrossEntropy of another vocab_size"
            )
        return weight

    def _arguments(
        self, function: str, hidden: Tensor, labels: Tensor, token_weight: Tensor | None
    ) -> dict[str, Any]:
        with refusals_told(function, self.tp_group, hidden):
            weight = self._own_weight()
        options = {name: getattr(self.options, name) for name in KEYWORDS}
        return dict(
            weight=weight,
            labels=labels,
            bias=self.bias,
            token_weight=token_weight,
            tp_group=self.tp_group,
            **options,
        )
