"""One call that says whether a model with the plug-in computes the loss that it had without."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flce_dist.hf.plug_in import OURS_ALONE, Settings


class LossPair(NamedTuple):
    """The losses of one batch, scalars."""

    fused: Tensor  # by linear_cross_entropy, from the hidden states
    own: Tensor  # the model's own, from real logits
    difference: Tensor  # relative to ``own``; in fp32 below 1e-5, in bf16 the rounding of logits


@torch.no_grad()
def check_loss(model: nn.Module, **batch: Any) -> LossPair:
    """Return the loss of this batch with the plug-in and without, both in ``eval()``.

    Under DDP, FSDP2 or tensor parallelism call it on every rank. label_smoothing, z_loss_weight and
    vocab_size, which a model's own loss does not have, are left out of both.

    Args:
        model: with the plug-in; also wrapped, compiled, sharded or with adapters.
        **batch: what the model takes, labels too.

    Raises ValueError if the model has no plug-in, or the batch no labels.

    Example::

        fused, own, difference = check_loss(model, input_ids=ids, labels=ids)
    """
    of_modules = [vars(x).get("linear_cross_entropy") for x in model.modules()]
    plugged: list[Settings] = [settings for settings in of_modules if settings is not None]
    if not plugged:
        raise ValueError(
            f"model must have the plug-in, got a {type(model).__name__} without; call "
            "use_linear_cross_entropy first"
        )
    if batch.get("labels") is None:
        raise ValueError(f"batch must have labels, got {sorted(batch)}")
    modes = [(module, module.training) for module in model.modules()]
    keywords = [settings.keywords for settings in plugged]
    model.eval()
    try:
        for settings in plugged:
            shared = {k: x for k, x in settings.keywords.items() if k not in OURS_ALONE}
            settings.keywords = shared
        fused = model(**batch, logits=False).loss
        for settings in plugged:
            settings.is_off = True
        own = model(**batch).loss
    finally:
        for settings, before in zip(plugged, keywords, strict=True):
            settings.keywords = before
            settings.is_off = False
        for module, mode in modes:
            module.training = mode
    return LossPair(fused, own, (fused - own).abs() / own.abs())
