"""Inputs of a tiny model of transformers, by what its forward takes: the likely ones first."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.hf_sweep_configs import VOCAB, within

BATCH = 2
TOKENS = 12
IMAGE = (3, 16, 16)


def batches(model: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs with labels, made of names that ``model.forward`` has."""
    takes = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(20, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = ids.masked_fill(torch.arange(TOKENS) < 4, -100)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("qformer_input_ids", "mm_token_type_ids", "bbox"):
        if name in takes:
            text[name] = beside(name, ids)
    media = [
        {name: torch.rand(size, generator=generator)}
        for name, size in media_of(model)
        if name in takes
    ]
    alone = [{}, *media] if required(takes) <= {"input_ids"} else media
    if model.main_input_name == "input_ids":
        candidates = [text | x for x in alone]
    elif model.config.is_encoder_decoder:
        main = [x for x in media if model.main_input_name in x]
        given = {"decoder_input_ids": ids} if "decoder_input_ids" in takes else text
        candidates = [*main, *(x | given for x in main)]
    else:
        candidates = [text | x for x in media if model.main_input_name in x] + [text]
    for inputs in candidates:
        yield {**inputs, "labels": labels}


def required(takes: Any) -> set[str]:
    """Return the names of parameters without a default."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    empty = inspect.Parameter.empty
    return {name for name, x in takes.items() if x.default is empty and x.kind not in kinds}


def beside(name: str, ids: Tensor) -> Tensor:
    """Return what some models want to know of their tokens."""
    if name == "qformer_input_ids":
        return ids
    if name == "mm_token_type_ids":
        return torch.zeros_like(ids)  # text
    corners = torch.tensor([1, 1, 5, 5])
    return corners.expand(*ids.shape, 4)


def media_of(model: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of images, videos and sounds; features have one of two layouts."""
    config = model.config
    bins = within(config, "num_mel_bins", within(config, "input_feat_per_channel", 80))
    frames = 2 * within(config, "max_source_positions", 32)
    joined = within(config, "feature_projection_input_dim", bins)
    return [
        ("pixel_values", (BATCH, *IMAGE)),
        ("pixel_values", (BATCH, 2, *IMAGE)),
        ("input_features", (BATCH, bins, frames)),
        ("input_features", (BATCH, frames, joined)),
        ("input_features", (BATCH, bins, 8 * TOKENS)),
        ("input_values", (BATCH, 1600)),
        ("flattened_patches", (BATCH, 8, 2 + within(config, "patch_embed_hidden_size", 32))),
    ]
