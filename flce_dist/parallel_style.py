"""``LinearCrossEntropyParallel``: the fused output layer for torch's ``parallelize_module``.

B sequences, S tokens of each, H = hidden size, V_all = rows of the weight, P = ranks of the mesh.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import Unpack

from flce_dist.api import linear_cross_entropy
from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import check_hidden_of_logits
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.options import KEYWORDS, LossOptions, StyleOptions, keywords_of
from flce_dist.arguments.rank_check import check_facts_once, refusals_told

_LOGITS = "LinearCrossEntropyParallel's logits"

_FIXED: dict[str, Any] = {
    "sequence_parallel": False,
    "sequence_dim": 0,
    "vocab_range": None,
    "reduce_dhidden": True,
    "accumulate_dweight": False,
}
"""Options that follow from placements, or need a plain weight."""


class LinearCrossEntropyParallel(ParallelStyle):
    """Split an ``nn.Linear`` by vocabulary, and let it return the loss when it gets labels.

    ::

        parallelize_module(model, mesh["tp"], {"lm_head": LinearCrossEntropyParallel()})
        loss = model.lm_head(hidden, labels)  # no logits
        logits = model.lm_head(hidden)  # [..., V_all], the same on all ranks

    Weight and bias become DTensors with ``Shard(0)``, as ``ColwiseParallel`` makes them, so state
    dicts, optimizers and ``torch.distributed.checkpoint`` treat them like the model's others, and
    ``fully_shard`` may follow over another dimension of the mesh. A weight that is such a DTensor
    already stays as it is, so an embedding that was split with ``Shard(0)`` may be tied to it.

    Args:
        input_layouts: the placement of hidden states over the mesh. ``Replicate()``: all P ranks
            have the same [..., H]. ``Shard(1)``: sequence parallelism, [B, S / P, H] on each rank;
            ``Shard(0)``: [S / P, ..., H]. Labels are those of all tokens, the same on all ranks.
            dhidden has the same placement.
        **options: reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale,
            vocab_size, reduce_in_fp32, tp_invariant, schedule, max_logits_bytes, max_counted,
            skip_ignored and impl, as in ``linear_cross_entropy``. Logits have logit_scale and
            softcap applied and keep the columns from ``vocab_size`` on.

    Raises:
        ValueError: an option or ``input_layouts`` is wrong, or the mesh has several dimensions.
        NotImplementedError: the module is no ``nn.Linear`` but, say, a subclass or an adapter.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, **options: Unpack[StyleOptions]
    ) -> None:
        super().__init__()
        keywords = keywords_of(LinearCrossEntropyParallel.__init__, options, **_FIXED)
        layout = Replicate() if input_layouts is None else input_layouts
        if isinstance(layout, Shard):
            keywords.update(sequence_parallel=True, sequence_dim=layout.dim)
        if layout not in (Replicate(), Shard(0), Shard(1)):
            raise ValueError(
                f"input_layouts must be Replicate(), Shard(0) or Shard(1), got "
                f"{values.shown(layout)}"
            )
        self.input_layouts = layout
        self.options = checked_options(**keywords)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Split the parameters of ``module`` in place and return it; collective."""
        if device_mesh.ndim != 1:
            raise ValueError(
                "device_mesh must have one dimension, whose ranks share the vocabulary, got "
                f"{device_mesh}; pass one of its dimensions, such as mesh['tp']"
            )
        if type(module) is not nn.Linear or "forward" in vars(module):
            raise NotImplementedError(
                "LinearCrossEntropyParallel needs an nn.Linear with its own forward, got "
                f"{type(module).__name__}"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                _check_rows(name, parameter, device_mesh)
                continue
            rows = distribute_tensor(
                parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            split = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            module.register_parameter(name, split)
        module.__class__ = LinearWithLoss
        vars(module).update(
            mesh=device_mesh, input_layouts=self.input_layouts, options=self.options
        )
        return module

    def __repr__(self) -> str:
        changed = {k: x for k, x in vars(self.options).items() if x != getattr(LossOptions, k)}
        options = "".join(f", {k}={x!r}" for k, x in changed.items() if k not in _FIXED)
        return f"{type(self).__name__}(input_layouts={self.input_layouts!r}{options})"


class LinearWithLoss(nn.Linear):
    """An ``nn.Linear`` after ``LinearCrossEntropyParallel``, which made its attributes."""

    mesh: DeviceMesh
    input_layouts: Placement
    options: LossOptions

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        temperature: float | Tensor = 1.0,
    ) -> Tensor:
        """Return the loss of ``labels`` [B, S] or [...]; without labels all logits [..., V_all].

        Both are plain tensors, the same on all ranks. ``input`` [..., H] has ``input_layouts``, or
        is a DTensor with that placement; the other arguments are those of
        ``linear_cross_entropy``, and so are the errors.
        """
        if labels is None:
            if token_weight is not None or isinstance(temperature, Tensor) or temperature != 1.0:
                raise ValueError(
                    "token_weight and temperature need labels, got none: divide the logits by the "
                    "temperature"
                )
            return self._logits(input)
        options = {name: getattr(self.options, name) for name in KEYWORDS}
        return linear_cross_entropy(
            input,
            self.weight,
            labels,
            bias=self.bias,
            token_weight=token_weight,
            temperature=temperature,
            tp_group=self.mesh.get_group(),
            **options,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return all logits of all tokens, [..., V_all] in hidden's dtype, with their gradient."""
        group = self.mesh.get_group()
        with refusals_told(_LOGITS, group, hidden):
            check_hidden_of_logits(hidden, self.weight, self.options)
        facts: dict[str, Any] = {"hidden.shape": list(hidden.shape), "dtype": str(hidden.dtype)}
        check_facts_once(_LOGITS, facts, group, hidden)
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self.mesh, [self.input_layouts], run_check=False)
        # Products of plain tensors: DTensor's do not run for no tokens, or one row of weight.
        tokens = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        weight: Any = self.weight
        bias: Any = self.bias
        of_rows = F.linear(tokens, weight.to_local())
        z = self.options.logits_of(of_rows, None if bias is None else bias.to_local())
        shape = torch.Size((*z.shape[:-1], len(weight)))
        whole = DTensor.from_local(
            z,
            self.mesh,
            [Shard(z.dim() - 1)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return whole.redistribute(placements=[Replicate()]).to_local()


def _check_rows(name: str, x: DTensor, mesh: DeviceMesh) -> None:
    if x.device_mesh != mesh or x.placements != (Shard(0),):
        raise ValueError(
            f"{name} must be a plain tensor or a DTensor with Shard(0) over {mesh}, got "
            f"{x.placements} on {x.device_mesh}"
        )
