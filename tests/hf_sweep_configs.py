"""Tiny configs of transformers, by the names that its configs share."""

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
         "attention_hidden_size", "lru_width"), 32,
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
         "decoder_attention_heads"), 4,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions",
         "max_source_positions", "max_sequence_length", "max_seq_len"), 64,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
         "num_routed_experts"), 4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_selected_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("image_size", "input_size"), 16),
    **dict.fromkeys(("patch_size", "spatial_patch_size"), 8),
    **dict.fromkeys(("rotary_dim",), 4),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention_window"), 8),
    **dict.fromkeys(("mamba_d_ssm",), 64),
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

MULTIMODAL_ROPE = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "glm4v", "glm46v", "glm_ocr", "paddle")
OF_TYPE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global"], LAYERS]], "num_layers": LAYERS},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "moonshine": {"pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 4},
    "pop2piano": {"decoder_start_token_id": 0},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""Options of single model types, beside or instead of those by name."""


def tiny(config_class: Any) -> Any:
    """Return a config of this class whose model fits in a few megabytes."""
    return config_class(**changes_of(config_class()))


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


def changes_of(config: Any) -> dict[str, Any]:
    """Return the arguments that make this config, and those within it, tiny."""
    takes = {name for name in config.to_dict() if name not in ("transformers_version",)}
    takes |= set(inspect.signature(type(config).__init__).parameters)
    changes: dict[str, Any] = {}
    for name in sorted(takes):
        value = option_of(config, name)
        if isinstance(value, PretrainedConfig):
            changes[name] = {**changes_of(value), "model_type": value.model_type}
        elif name in SIZES and isinstance(value, int | type(None)) and value is not None:
            changes[name] = SIZES[name]
        elif "dropout" in name or name.endswith(("_drop", "pdrop", "layerdrop")):
            if isinstance(value, float):
                changes[name] = 0.0
        elif name.endswith("_token_id") or name.endswith("_token_index"):
            if isinstance(value, int):
                changes[name] = value % 20
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            kinds = list(dict.fromkeys(value))
            changes[name] = (kinds[-LAYERS:] * LAYERS)[:LAYERS]
        elif name in SCALES and isinstance(value, int | float):
            changes[name] = 0.5
        elif name in ("use_cache", "apply_spec_augment"):
            changes[name] = False
        elif name == "rope_parameters" and any(x in config.model_type for x in MULTIMODAL_ROPE):
            changes[name] = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
    if "qk_rope_head_dim" in changes:  # all heads have keys of their own
        changes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "num_attention_heads" in changes and option_of(config, "head_dim", ...) is None:
        changes["head_dim"] = 8
    changes |= OF_TYPE.get(config.model_type, {})
    for name, value in list(changes.items()):
        if isinstance(value, dict) and "model_type" in value:
            kind = value.pop("model_type")
            changes[name] = AutoConfig.for_model(kind, **value) if kind else value
    return changes
