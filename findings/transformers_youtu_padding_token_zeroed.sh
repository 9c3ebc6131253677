#!/usr/bin/env bash
# transformers 5.24.0: from_pretrained of Youtu sets the embedding of the padding token to zero,
# though the checkpoint has it, and as the output layer is tied to the embeddings, the token's logit
# too. So with the end-of-text token as padding, as is usual for fine-tuning, a saved model is not
# the one that is loaded: it reads that token as zeros and no longer predicts it. No error, no
# warning, and no key is reported as missing. DeepSeek-V3, from which Youtu is derived, loads what
# was saved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, YoutuConfig, YoutuForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
END = 5
shape = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "bos_token_id": None,
    "eos_token_id": END, "pad_token_id": None, "tie_word_embeddings": True,
}
torch.manual_seed(0)
ids = torch.randint(6, 64, (1, 8))
ids[0, 3] = END  # as between two turns of a conversation
is_as_described = True
for model_class, config in (
    (DeepseekV3ForCausalLM, DeepseekV3Config(**shape, first_k_dense_replace=2)),
    (YoutuForCausalLM, YoutuConfig(**shape)),
):
    torch.manual_seed(0)
    model = model_class(config).eval()
    path = Path(sys.argv[1], model_class.__name__)
    for pad in (None, END):
        model.config.pad_token_id = pad
        model.save_pretrained(path)
        loaded, report = model_class.from_pretrained(path, output_loading_info=True)
        loaded.eval()
        with torch.no_grad():
            before, after = model(ids).logits[0], loaded(ids).logits[0]
        norms = [m.get_input_embeddings().weight[END].norm().item() for m in (model, loaded)]
        print(f"{model_class.__name__}, pad_token_id={pad}: norm of the embedding of the end token")
        print(f"    saved {norms[0]:.4f}, loaded {norms[1]:.4f}; its logits up to", end=" ")
        print(f"{before[:, END].abs().max():.4f} and {after[:, END].abs().max():.4f};")
        change = (before - after)[:, END + 1 :].abs().amax(1)
        print(f"    logits of other tokens change by up to {change[:3].max():.4f} before it,")
        print(f"    and from it on by up to {change[3:].max():.4f}")
        is_as_described &= norms[0] > 0.1 and not report["missing_keys"]
        is_as_described &= change[:3].max().item() == 0
        if model_class is YoutuForCausalLM and pad == END:
            is_as_described &= norms[1] == 0 and after[:, END].abs().max().item() == 0
            is_as_described &= change[3:].max().item() > 0.1
        else:
            is_as_described &= torch.equal(before, after)
sys.exit(0 if is_as_described else "Youtu now loads the embedding of the padding token")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
