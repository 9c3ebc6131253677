"""A ``LogitsSaverHooks`` of megatron-core that saves a teacher's best log-probabilities without
logits. Its files are those of Megatron's own, for any vocabulary. Imports ``megatron.training``.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

import functools
from typing import Any

import torch
from megatron.training.distillation import logits_saver
from megatron.training.distillation.utils_logits import CACHED_LOGITS_LOGPROB_SENTINEL
from torch import Tensor

from flce_dist.best import linear_top_k

_IDS_OF_A_BIT = 1 << 17  # the files have 16 bits of an id, and a bool


class LogitsSaverHooks(logits_saver.LogitsSaverHooks):
    """Takes the place of ``megatron.training.distillation.LogitsSaverHooks``.

    While the model trains, its output layer returns zeros [s, b, 1] for logits; no rank computes
    any. ``k`` is at most 2048. Of a vocabulary above 131,072 the files have numbers where Megatron
    saves a bool: its own loader reads them as the higher bits of ids.
    """

    def attach_hooks(self, model: Any) -> None:
        layer = model.output_layer
        layer.forward = functools.partial(self._forward, layer, layer.forward)
        self._layers = [*getattr(self, "_layers", ()), layer]
        self._override_language_model_loss(model)

    def remove_hooks(self) -> None:
        super().remove_hooks()
        for layer in self._layers:
            del layer.forward  # an instance's; its class has the own one
        self._layers.clear()

    def _forward(
        self,
        layer: Any,
        real: Any,
        input_: Tensor,
        weight: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return zeros that depend on hidden and weight, as Megatron's zero loss does."""
        if not layer.training:
            return real(input_, weight, *args, **kwargs)
        weight = layer.weight if weight is None else weight
        self._forward_hook(layer, input_, ((layer, input_, weight),))
        edge = (input_ * 0).sum() + (weight.view(-1)[:1] * 0).sum()
        s = input_.shape[0] * (self.tp_size if layer.sequence_parallel else 1)
        return input_.new_zeros(s, input_.shape[1], 1) + edge, None

    def _override_language_model_loss(self, model: Any) -> None:
        self._loss_overrides.append((model, model.compute_language_model_loss))
        model.compute_language_model_loss = _zero_loss

    def _process_single_microbatch(
        self, logits: tuple[Any, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log-probabilities, and low and high bits of ids, [s, b, K]; on one rank of P.

        ``logits`` are what they are computed from: the layer, this rank's hidden and weight.
        """
        layer, hidden, weight = logits
        best = linear_top_k(
            hidden,
            weight,
            min(self.k, layer.output_size),
            bias=None if layer.skip_bias_add else layer.bias,
            tp_group=self.tp_group,
            sequence_parallel=layer.sequence_parallel,
        )
        if self.tp_rank != 0:
            return None
        values = best.logprob
        ids = best.ids
        assert values is not None and ids is not None
        if self.p is not None:
            values, ids = self._apply_topp_truncation(values, ids)
        values = values.clamp_min(CACHED_LOGITS_LOGPROB_SENTINEL).to(self._save_dtype)
        high = torch.bool if layer.output_size <= _IDS_OF_A_BIT else torch.uint8
        return values, (ids & 0xFFFF).to(torch.uint16), (ids >> 16).to(high)


def _zero_loss(labels: Tensor, zeros: Tensor) -> Tensor:
    return zeros[..., 0].transpose(0, 1).contiguous()
