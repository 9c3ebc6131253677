"""``python -m tests.hf_sweep``: a step of every causal, image- or audio-to-text class, both ways.

Each class of the installed transformers is built with a tiny config, and a step of training with
the plug-in is compared with its own: loss and all gradients, in fp32. The results go to
docs/results/hf-classes.json and the list in docs/hugging_face.md. With arguments (Llama Bart) only
classes whose names begin so run, and are printed.
"""

import copy
import gc
import re
import signal
import sys
import textwrap
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from flce_dist.hf import NO_LOGITS, use_linear_cross_entropy
from tests.hf_models import real_logits
from tests.hf_sweep_batches import batches
from tests.hf_sweep_configs import VOCAB, tiny
from tests.hf_sweep_page import write

BUDGET = 1e-4  # of the loss, and relative RMS of all gradients together; fp32, many layers
SECONDS = 120
MOST_PARAMETERS = 100_000_000
MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "several to text": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "audio to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}


def classes() -> dict[str, tuple[str, str]]:
    """Return the names of classes -> (their first mapping, model type)."""
    found: dict[str, tuple[str, str]] = {}
    for kind, mapping in MAPPINGS.items():
        for model_type, name in getattr(modeling_auto, mapping, {}).items():
            for one in [name] if isinstance(name, str) else name:
                found.setdefault(one, (kind, model_type))
    return found


def built(name: str, fills: bool) -> Any:
    """Return the model with random weights, in training mode without dropout."""
    model_class = getattr(transformers, name)
    config = tiny(model_class.config_class, fills)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters with the tiny config")
    torch.manual_seed(0)
    model = model_class(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for p in model.parameters():
        if p.is_floating_point() and p.dim() > 1:
            nn.init.normal_(p, std=0.1)
    return model


def step(model: Any, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Return the output, and loss and all gradients as one vector."""
    model.zero_grad()
    torch.manual_seed(2)
    out = model(**inputs)
    if out.loss is None:
        raise ValueError("labels give no loss")
    out.loss.backward()
    gradients = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()
    ]
    return out, torch.cat([out.loss.detach().reshape(1), *gradients])


def compared(name: str) -> dict[str, Any]:
    """Return what a step of this class gives: its result, its error, and why it is not fused."""
    try:
        untouched, inputs, expected = own_step(name)
    except Exception as error:
        return {"result": "not built", "why": first_line(error)}
    try:
        plugged = use_linear_cross_entropy(untouched)
    except NotImplementedError as error:
        return {"result": "refused", "why": first_line(error)}
    try:
        with warnings.catch_warnings(record=True) as caught, real_logits(VOCAB) as made:
            warnings.simplefilter("always")
            out, found = step(plugged, inputs)
    except Exception as error:
        return {"result": "WRONG", "why": first_line(error)}
    reasons = [str(x.message) for x in caught if "from real logits" in str(x.message)]
    loss_error = float((found[0] - expected[0]).abs() / expected[0].abs())
    gradient_error = float((found[1:] - expected[1:]).norm() / expected[1:].norm())
    largest = max(gradient_error, loss_error)
    result: dict[str, Any] = {"result": "real logits" if reasons else "fused"}
    is_fused = out.get("logits") is NO_LOGITS and not made
    says_why_not = bool(reasons)
    if not largest <= BUDGET or is_fused == says_why_not:
        result = {"result": "WRONG"}
    if reasons:
        result["why"] = reasons[0].split(": ", 1)[1].split(";")[0]
    return {**result, "error": float(f"{largest:.1e}")}


def own_step(name: str) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """Return a model, inputs that it takes, and what its own step gives.

    Of the tiny configs and inputs the first that work; if none does, the first one's error is
    raised.
    """
    first = None
    for fills in (False, True):
        try:
            model = built(name, fills)
        except Exception as error:
            first = first or error
            continue
        for inputs in batches(model):
            try:
                _, expected = step(copy.deepcopy(model), inputs)  # a step leaves state in some
                return model, inputs, expected
            except Exception as error:
                first = first or error
    assert first is not None
    raise first


class OutOfTime(BaseException):
    """No Exception, so that no attempt takes it for its own failure."""


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(lines[:2]))
    return textwrap.shorten(f"{type(error).__name__}: {text}", 180, placeholder=" ...")


def in_time(name: str) -> dict[str, Any]:
    """``compared``, or that it took too long."""

    def end(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        return compared(name)
    except OutOfTime:
        return {"result": "not built", "why": f"more than {SECONDS} s"}
    finally:
        signal.alarm(0)


def main(prefixes: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name, (kind, model_type) in sorted(classes().items()):
        if prefixes and not name.startswith(tuple(prefixes)):
            continue
        found[name] = {"kind": kind, "type": model_type, **in_time(name)}
        gc.collect()
        print(name, found[name], flush=True)
    if not prefixes:
        write(found)
    return int(any(x["result"] == "WRONG" for x in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
