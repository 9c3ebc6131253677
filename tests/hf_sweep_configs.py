"""Tiny configs of transformers, by the names that its configs share."""

import copy
import inspect
from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCAB = 98
LAYERS = 2

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "emb_dim",
         "embedding_size", "model_dim", "output_dim", "projection_dim", "text_hidden_size",
         "lru_width", "hidden_size_global", "cross_hidden_size", "codebook_dim",
         "audio_hidden_size", "out_hidden_size", "adapter_input_size", "encoder_hidden_size",
         "image_token_embed_dim", "adapter_in_dim", "adapter_out_dim", "base_channels",
         "latent_channels", "upsample_groups"), 32,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
         "n_inner", "dim_ff", "d_ff", "intermediate_size_mlp", "shared_intermediate_size",
         "block_ff_dim"), 48,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers", "depth", "num_encoder_layers", "num_decoder_layers"), LAYERS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "indexer_n_heads"), 4,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim", "d_kv"), 8,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions",
         "max_source_positions", "max_sequence_length", "max_seq_len"), 64,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
         "num_routed_experts"), 4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "moe_topk", "num_selected_experts", "top_k_experts"), 2,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "indexer_kv_heads"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("image_size", "input_size"), 16),
    **dict.fromkeys(("patch_size", "spatial_patch_size"), 8),
    **dict.fromkeys(("rotary_dim", "num_filters", "indexer_compress_ratio"), 4),
    **dict.fromkeys(("indexer_budget", "indexer_head_dim"), 8),
    **dict.fromkeys(("encoder_hash_byte_group_vocab", "ngram_vocab_size_base"), 512),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention_window"), 8),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 64),
    **dict.fromkeys(("mamba_n_heads",), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel"), 16),
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
         "linear_value_head_dim"), 4,
    ),
}  # fmt: skip
"""The values of options by name; those of a config that has no such option are left out."""


SCALES = ("logits_scaling", "lm_head_multiplier", "logit_scale", "output_multiplier")
"""Numbers that scale logits, and are often 1 by default."""

LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
AT_MOST = ("num_experts_per_tok", "moe_topk", "moe_k")
"""Sizes of which a model may have only one."""

ROPE = {"rope_theta": 1e4, "rope_type": "default"}
IMAGE_ROPE = {**ROPE, "mrope_section": [2, 1, 1]}  # of head_dim / 2: time, height, width

OF_TYPE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "blt_patcher": {"vocab_size": VOCAB + 2},  # its logits are not the model's
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global"], LAYERS]], "num_layers": LAYERS},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "moonshine": {"pad_token_id": 0},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 4},
    "paddleocr_vl_text": {"rope_parameters": IMAGE_ROPE},
    "pop2piano": {"decoder_start_token_id": 0},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 7},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 7},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"layers_block_type": ["hybrid", "hybrid"]},
    "xmod": {"default_language": "en_XX"},
}
"""Options of single model types, beside or instead of those by name."""


def tiny(config_class: Any, fills: bool = False) -> Any:
    """Return a config of this class whose model fits in a few megabytes.

    ``fills``: options that are None get sizes and ids too.
    """
    return config_class(**changes_of(config_class(), fills))


def option_of(config: Any, name: str, default: Any = None) -> Any:
    """Return an option; ``default`` too if it differs by layer, which is an error of its own."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def within(config: Any, name: str, default: int) -> int:
    """Return an option of this config or of the first one in it that has it."""
    configs = [config, *(x for x in vars(config).values() if isinstance(x, PretrainedConfig))]
    found = [value for x in configs if isinstance(value := option_of(x, name), int)]
    return found[0] if found else default


def changes_of(config: Any, fills: bool) -> dict[str, Any]:
    """Return the arguments that make this config, and those within it, tiny."""
    takes = {name for name in config.to_dict() if name not in ("transformers_version",)}
    takes |= set(inspect.signature(type(config).__init__).parameters)
    layers = option_of(config, "num_hidden_layers", 0)
    changes: dict[str, Any] = {}
    for name in sorted(takes):
        value = option_of(config, name)
        if isinstance(value, PretrainedConfig):
            changes[name] = config_within(value, fills)
        elif (change := changed(name, value, fills, layers)) is not None:
            changes[name] = change
    changes |= agreeing(config, changes) | OF_TYPE.get(config.model_type, {})
    return copy.deepcopy(changes)  # configs write into the dicts that they are given


def config_within(config: Any, fills: bool) -> Any:
    changes = changes_of(config, fills)
    if not config.model_type:
        return changes
    return AutoConfig.for_model(config.model_type, **changes)


def changed(name: str, value: Any, fills: bool, layers: int) -> Any:
    """Return what an option becomes, None if it stays as it is."""
    if isinstance(value, bool):
        return False if name in ("use_cache", "apply_spec_augment") else None
    if name in SIZES and isinstance(value, int):
        is_at_most = value == 0 or name in AT_MOST  # 0: the model has none of this
        return min(SIZES[name], value) if is_at_most else SIZES[name]
    if name in SIZES and value is None and fills:
        return SIZES[name]
    if "dropout" in name or name.endswith(("_drop", "pdrop", "layerdrop")):
        return 0.0 if isinstance(value, float) else None
    if name.endswith(("_token_id", "_token_index")):
        if isinstance(value, int):
            return value % 20
        return len(name) % 20 if fills and value is None else None
    if name in LAYER_KINDS and value:
        kinds = list(dict.fromkeys(value))
        return (kinds[-LAYERS:] * LAYERS)[:LAYERS]
    if name in SCALES and isinstance(value, int | float):
        return 0.5
    return changed_list(name, value, layers) if isinstance(value, list | tuple) else None


def changed_list(name: str, value: Any, layers: int) -> Any:
    """Return a list with one entry for each layer, or of layers' numbers, for fewer layers."""
    if layers and len(value) == layers:
        return type(value)(value[:LAYERS])
    if "layer" in name and all(isinstance(x, int) for x in value):
        return type(value)(x % LAYERS for x in value)
    return None


def agreeing(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the options that others decide."""
    found: dict[str, Any] = {}
    heads = changes.get("num_attention_heads")
    if heads and option_of(config, "num_attention_heads") == option_of(
        config, "num_key_value_heads"
    ):
        found["num_key_value_heads"] = heads
    if "qk_rope_head_dim" in changes:  # all heads have keys of their own
        found["num_key_value_heads"] = SIZES["num_attention_heads"]
    if heads and option_of(config, "head_dim", ...) is None:
        found["head_dim"] = SIZES["head_dim"]
    rope = option_of(config, "rope_parameters")
    if "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()):
        found["rope_parameters"] = IMAGE_ROPE
    elif "qk_rope_head_dim" in changes and "partial_rotary_factor" in (rope or {}):
        found["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
    if config.is_encoder_decoder:
        starts = {"pad_token_id": 0, "decoder_start_token_id": 1}
        found |= {name: x for name, x in starts.items() if option_of(config, name) is None}
    return found
