#!/usr/bin/env bash
# haliax 1.4.dev453: nn.attention.mask_to_bias makes the bias of the opposite mask. All masks of
# that module (causal_mask, prefix_lm_mask, the mask of dot_product_attention) are true where a
# query may attend, but the bias is -1e9 there and 0 elsewhere. So attention whose bias is made of a
# causal mask lets each position see the later ones alone, and the last one, which has none, all
# equally, where the mask itself gives causal attention. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 \
    equinox==0.13.8 aqtp==0.9.0 haliax==1.4.dev453
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")
import haliax  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from haliax.nn import attention  # noqa: E402

print("jax", jax.__version__, "haliax", version("haliax"))
Query, Key, Size = haliax.make_axes(query=4, key=4, size=8)
query = haliax.random.normal(jax.random.key(0), (Query, Size))
key = haliax.random.normal(jax.random.key(1), (Key, Size))
logits = np.einsum("qs,ks->qk", query.array, key.array, dtype=np.float64) / Size.size**0.5


def expected_weights(allowed):
    """Return softmax over the keys that a row allows, or over equal logits if it allows none."""
    masked = np.where(allowed, logits, -1e9)
    weights = np.exp(masked - masked.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def weights_of(**how):
    weights = attention.dot_product_attention_weights(Size, Key, query, key, **how)
    return np.asarray(weights.rearrange((Query, Key)).array)


is_as_described = True
for name, mask in (
    ("causal_mask", attention.causal_mask(Query, Key)),
    ("prefix_lm_mask", attention.prefix_lm_mask(Query, Key, 2)),
):
    allowed = np.asarray(mask.rearrange((Query, Key)).array)
    by_mask = weights_of(mask=mask)
    by_bias = weights_of(bias=attention.mask_to_bias(mask))
    print(f"mask={name}:", *by_mask.round(3), sep="\n")
    print(f"bias=mask_to_bias({name}):", *by_bias.round(3), sep="\n")
    # Beside -1e9 an fp32 logit is lost, so rows that allow no key are equal.
    is_as_described &= np.allclose(by_mask, expected_weights(allowed), atol=1e-5)
    is_as_described &= np.allclose(by_bias, expected_weights(~allowed), atol=1e-5)
sys.exit(0 if is_as_described else "mask_to_bias now makes another bias")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
