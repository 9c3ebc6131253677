"""A loss of torchtitan 0.3's trainer, which leaves its model's output layer to the loss."""

import functools
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import override
from torchtitan.distributed.spmd_types import current_spmd_mesh
from typing_extensions import Unpack

from flce_dist.api import linear_cross_entropy
from flce_dist.arguments import values
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.options import TorchtitanOptions, keywords_of
from flce_dist.parallel.collectives import group_rank, group_size
from flce_dist.parallel.vocab import vocab_range

_FIXED: dict[str, Any] = {
    "reduction": "sum",
    "vocab_size": None,
    "vocab_range": None,
    "sequence_parallel": False,
    "sequence_dim": 0,
    "reduce_dhidden": False,
    "reduce_in_fp32": False,
    "accumulate_dweight": False,
}
"""Options that torchtitan's trainer and its mesh decide."""


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """The sum of this rank's losses over ``global_valid_tokens``, as in torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """``options`` are keywords of ``linear_cross_entropy``, checked here and by ``build``.

        Not those that the trainer decides: reduction, vocab_size, vocab_range, sequence_parallel,
        sequence_dim, reduce_dhidden, reduce_in_fp32 and accumulate_dweight. Another name raises a
        TypeError, a wrong value a ValueError or NotImplementedError.
        """

        options: dict[str, Any] = field(default_factory=dict)

        def __post_init__(self) -> None:
            _check_options(self.options)

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        _check_options(config.options)  # of a configuration that was changed
        self.options = dict(config.options)

    def set_lm_head(self, lm_head: Any) -> None:
        """Let ``lm_head(hidden, labels)`` be the loss, so that FSDP2's hooks gather the weight."""
        if type(lm_head).forward is not nn.Linear.forward:
            raise NotImplementedError(f"lm_head must be an nn.Linear, got {type(lm_head).__name__}")
        self.lm_head = lm_head
        # A partial is copied and pickled with the layer, which a method of an instance is not.
        lm_head.forward = functools.partial(_forward, self, lm_head)

    __call__ = BaseLoss.__call__  # divides what ``fn`` returns

    def fn(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of hidden states [B, S, H] and labels [B, S]."""
        typed = spmd.is_type_checking()
        with spmd.no_typecheck():
            loss = self.lm_head(hidden, labels)
            if typed:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss

    def _sum_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """torchtitan sums dhidden over the ranks that share the vocabulary."""
        weight = self.lm_head.weight
        bias = self.lm_head.bias
        V_all = self.lm_head.out_features
        mesh = weight.device_mesh if isinstance(weight, DTensor) else current_spmd_mesh()
        group = mesh.get_group("tp") if mesh and "tp" in (mesh.mesh_dim_names or ()) else None
        rows = vocab_range(V_all, group_rank(group), group_size(group))
        loss = linear_cross_entropy(
            _local(hidden),
            _local(weight),
            _local(labels),
            bias=bias,
            reduction="sum",
            vocab_size=V_all,
            vocab_range=rows,
            tp_group=group,
            reduce_dhidden=False,
            **self.options,
        )
        if not isinstance(labels, DTensor):
            return loss
        sums = [Partial() if has.is_shard() else Replicate() for has in labels.placements]
        return DTensor.from_local(loss, labels.device_mesh, sums)


def _forward(loss: LinearCrossEntropyLoss, lm_head: nn.Linear, x: Tensor, *labels: Tensor) -> Any:
    """Return the loss of hidden states if there are labels, else their logits."""
    return loss._sum_of(x, *labels) if labels else nn.Linear.forward(lm_head, x)


def _check_options(options: dict[str, Any]) -> None:
    if not isinstance(options, dict):
        raise ValueError(f"options must be a dict, got {values.shown(options)}")
    keywords = keywords_of(LinearCrossEntropyLoss.Config, options, **_FIXED)
    checked_options(**keywords)


def _local(x: Any) -> Any:
    """Return what this rank has of ``x``; the gradient is a share where all ranks have the same."""
    if not isinstance(x, DTensor):
        return x
    shares = [Partial() if has.is_replicate() else has for has in x.placements]
    return x.to_local(grad_placements=shares)


@override(target=BaseLoss.Config, description="flce_dist.linear_cross_entropy, without logits")
def linear_cross_entropy_loss(
    config: Any, **options: Unpack[TorchtitanOptions]
) -> LinearCrossEntropyLoss.Config:
    """Return what takes the place of torchtitan's cross entropy, chunked or not.

    ``options`` are those of ``LinearCrossEntropyLoss.Config``.
    """
    kind = type(getattr(config, "loss_fn", config))
    if kind is not CrossEntropyLoss.Config:
        raise NotImplementedError(f"loss must be CrossEntropyLoss, got {kind.__qualname__}")
    return LinearCrossEntropyLoss.Config(options={**options})
