#!/usr/bin/env bash
# fairseq2 0.8.1: ChunkedAttentionBias, "a chunked attention bias" that layers of Llama 4 with local
# attention have, is 1 where a token may be seen and 0 where it may not, and is added to the scores:
# nothing is masked. So every token sees later ones, its own label among them, and those of other
# chunks; attention only prefers earlier tokens of its chunk by a factor of e. In decoding, where
# later tokens are not there yet, the same model gives other logits. No error, no warning.
# CausalAttentionBias, of the same model without chunks, is -inf where a token may not be seen.
# (fairseq2n, the part in C++, wants a CUDA build of torch and is not called here: an empty module
# stands in for it, with the flag with which fairseq2 builds its documentation.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==4.57.3 \
    tiktoken==0.12.0 ruamel.yaml==0.18.16 rich==14.2.0 clusterscope==0.0.32 \
    importlib-metadata==7.2.1 importlib-resources==6.5.2 packaging==24.2
"$folder/venv/bin/pip" install --quiet --no-deps fairseq2==0.8.1
mkdir "$folder/fairseq2n"
echo "DOC_MODE = True" > "$folder/fairseq2n/__init__.py"
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

warnings.filterwarnings("ignore")
import torch
from fairseq2.models.llama4.config import Llama4Config, Llama4ExpertsConfig
from fairseq2.models.llama4.factory import create_llama4_model
from fairseq2.nn import BatchLayout

LENGTH, VOCAB_SIZE, CHANGED = 24, 50, 12
torch.manual_seed(0)
ids = torch.randint(VOCAB_SIZE, (1, LENGTH))
changed_ids = ids.clone()
changed_ids[0, CHANGED] = (ids[0, CHANGED] + 1) % VOCAB_SIZE


def make_model(chunk_size):
    torch.manual_seed(1)
    config = Llama4Config(
        model_dim=32,
        num_layers=1,
        num_attn_heads=4,
        num_key_value_heads=2,
        ffn_inner_dim=64,
        vocab_size=VOCAB_SIZE,
        max_seq_len=64,
        attention_chunk_size=chunk_size,
        experts=Llama4ExpertsConfig(interleave_moe_layer_step=100),  # dense
    )
    return create_llama4_model(config).eval()


is_as_described = True
for chunk_size, expected in (
    (0, list(range(CHANGED, LENGTH))),  # without chunks: all later positions
    (8, list(range(CHANGED, 16))),  # those of its chunk, 8 to 15
):
    model = make_model(chunk_size)
    with torch.no_grad():
        logits = model(ids, BatchLayout.of(ids))
        other = model(changed_ids, BatchLayout.of(ids))
        part = ids[:, : CHANGED + 1]
        prefix = model(part, BatchLayout.of(part))
    difference = (logits - other).abs().amax(-1)[0]
    found = (difference > 1e-4).nonzero().flatten().tolist()
    from_prefix = (prefix - logits[:, : CHANGED + 1]).abs().max().item()
    print(f"attention_chunk_size {chunk_size}, another token at position {CHANGED}")
    print(f"    logits change at {found}, expected at {expected}")
    print(f"    logits of the first {CHANGED + 1} tokens alone differ by {from_prefix:.5f}")
    if chunk_size == 0:
        is_as_described &= found == expected and from_prefix < 1e-5
    else:
        is_as_described &= found == list(range(LENGTH)) and from_prefix > 0.01
sys.exit(0 if is_as_described else "chunked attention no longer sees later tokens")
PROGRAM
PYTHONPATH="$folder" "$folder/venv/bin/python" "$folder/program.py"
