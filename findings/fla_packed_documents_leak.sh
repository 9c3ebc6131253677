#!/usr/bin/env bash
# flash-linear-attention 0.6.0: its models take cu_seqlens, the bounds of documents packed into
# one row ("used for variable-length training, consistent with the FlashAttention API"). Those of
# linear attention, Mamba and Mamba 2 take it without a word and ignore it: LinearAttentionModel
# does not hand it to its layers, which would heed it, and Mamba's layers do not read it. So
# every document sees the ones before it, and loss and perplexity of packed rows are not those of
# the documents. No error, no warning; GLA, RetNet, GSA and HGRN2 give a document's own logits.
# (The authors know it: their tests skip variable lengths for these and other models. Neither
# documentation nor code says it.)
# (Shown on a CPU in Triton's interpreter, of each kernel with the first of its configurations.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 triton==3.7.1 \
    transformers==5.24.0 fla-core==0.6.0 flash-linear-attention==0.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import triton  # noqa: E402

autotune = triton.autotune
triton.autotune = lambda configs, **options: autotune(
    configs[:1], **{name: value for name, value in options.items() if "prune" not in name}
)
import fla.models  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
VOCAB_SIZE, FIRST, SECOND = 50, 5, 8
torch.manual_seed(0)
ids = torch.randint(3, VOCAB_SIZE, (1, FIRST + SECOND))
cu_seqlens = torch.tensor([0, FIRST, FIRST + SECOND])
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": VOCAB_SIZE}
unfused = {"fuse_cross_entropy": False, "fuse_norm": False, "fuse_swiglu": False}


def make(name, **options):
    torch.manual_seed(1)
    config = getattr(fla.models, name + "Config")(**sizes, **unfused, **options)
    model = getattr(fla.models, name + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


is_as_described = True
for name, options in (
    ("GLA", {}),
    ("RetNet", {}),
    ("GSA", {}),
    ("HGRN2", {"expand_ratio": 16}),
    ("LinearAttention", {}),
    ("Mamba", {}),
    ("Mamba2", {"expand": 1, "head_dim": 16}),
):
    model = make(name, **options)
    with torch.no_grad():
        alone = model(ids[:, FIRST:], use_cache=False).logits
        packed = model(ids, cu_seqlens=cu_seqlens, use_cache=False).logits[:, FIRST:]
        joined = model(ids, use_cache=False).logits[:, FIRST:]
    from_alone = (packed - alone).abs().max().item()
    from_joined = (packed - joined).abs().max().item()
    print(f"{name:15}: logits of the second document, up to {alone.abs().max():.2f}, are", end=" ")
    print(f"{from_alone:.5f} from its own, {from_joined:.5f} from those without cu_seqlens")
    if name in ("LinearAttention", "Mamba", "Mamba2"):
        is_as_described &= from_alone > 0.05 and from_joined == 0
    else:
        is_as_described &= from_alone < 1e-4 and from_joined > 0.05

layer = make("LinearAttention").model.layers[0].attn
hidden = torch.randn(1, FIRST + SECOND, 32)
with torch.no_grad():
    packed = layer(hidden, cu_seqlens=cu_seqlens)[0][:, FIRST:]
    error = (packed - layer(hidden[:, FIRST:])[0]).abs().max().item()
print(f"the layer of LinearAttention alone, with cu_seqlens: {error:.5f} from its own")
is_as_described &= error < 1e-4
sys.exit(0 if is_as_described else "these models now keep packed documents apart")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
