"""All signatures and docstrings list the same options as the fields of LossOptions."""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import flce_dist
from flce_dist import (
    LinearCrossEntropy,
    data_parallel,
    data_parallel_linear_cross_entropy,
    divergence,
    linear_divergence,
    linear_logprob,
    linear_top_k,
    scores,
)
from flce_dist.arguments.options import NO_KEYWORDS, LossOptions
from flce_dist.megatron import plug_in, use_linear_cross_entropy

FIELDS = {field.name: field for field in dataclasses.fields(LossOptions)}
TENSORS = ["hidden", "weight", "labels", "bias", "token_weight"]

# A value of each option that is not the default.
CHANGED: dict[str, Any] = dict(
    reduction="sum", ignore_index=-1, label_smoothing=0.1, z_loss_weight=1e-3, softcap=30.0,
    logit_scale=0.5, vocab_size=9, vocab_range=(0, 9), sequence_parallel=True, sequence_dim=1,
    reduce_dhidden=False, reduce_in_fp32=True, tp_invariant=True, accumulate_dweight=True,
    schedule="recompute", max_logits_bytes=4096, max_counted=20, skip_ignored=True, impl="triton",
)  # fmt: skip


def options_of_module(**options: Any) -> LossOptions:
    return LinearCrossEntropy(4, 9, **options).options


def options_of_data_parallel(**options: Any) -> LossOptions:
    with mock.patch.object(data_parallel, "checked_options", side_effect=StopIteration) as checked:
        with contextlib.suppress(StopIteration):
            data_parallel_linear_cross_entropy(*[torch.zeros(1)] * 3, data_group=None, **options)
    return LossOptions(**checked.call_args.kwargs)


def options_of_scores(**options: Any) -> LossOptions:
    with mock.patch.object(scores.api, "_scored") as scored:
        linear_logprob(*[torch.zeros(1)] * 3, **options)
    return scored.call_args.args[0].options


def options_of_divergence(**options: Any) -> LossOptions:
    with mock.patch.object(divergence.api, "diverged") as diverged:
        linear_divergence(*[torch.zeros(1)] * 4, **options)
    return diverged.call_args.args[1].options


def options_of_megatron(**options: Any) -> LossOptions:
    class Layer(nn.Linear):
        output_size, config, tp_group = 9, None, None

    model: Any = nn.Module()
    model.output_layer = Layer(4, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plug_in, "replacement_of", lambda *args: Layer)
        use_linear_cross_entropy(model, **options)
    return LossOptions(**model.output_layer.loss_keywords)


# Who takes ``**options``: what becomes of them, and which options it does not take.
TAKERS: dict[str, tuple[Callable[..., LossOptions], set[str]]] = {
    "LinearCrossEntropy.__init__": (options_of_module, {"vocab_range", *NO_KEYWORDS}),
    "data_parallel_linear_cross_entropy": (
        options_of_data_parallel,
        {"sequence_parallel", "sequence_dim", "reduce_dhidden", *NO_KEYWORDS},
    ),
    "linear_logprob": (
        options_of_scores,
        {"reduction", "ignore_index", "label_smoothing", "z_loss_weight", "max_counted",
         "skip_ignored", *NO_KEYWORDS},
    ),
    "linear_divergence": (
        options_of_divergence,
        {"label_smoothing", "z_loss_weight", *NO_KEYWORDS},
    ),
    "use_linear_cross_entropy": (
        options_of_megatron,
        {"vocab_range", "sequence_parallel", "sequence_dim", "reduce_dhidden", "reduce_in_fp32",
         "tp_invariant", "accumulate_dweight", *NO_KEYWORDS},
    ),
}  # fmt: skip
ACCEPTED = [(taker, name) for taker in TAKERS for name in CHANGED if name not in TAKERS[taker][1]]
ACCEPTED.remove(("LinearCrossEntropy.__init__", "vocab_size"))  # a parameter of the layer's own


def test_every_option_has_another_value_here() -> None:
    assert {*CHANGED, *NO_KEYWORDS} == {*FIELDS}
    assert all(value != FIELDS[name].default for name, value in CHANGED.items())


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_with_metrics"])
def test_signatures_are_the_fields(name: str) -> None:
    parameters = dict(inspect.signature(getattr(flce_dist, name)).parameters)
    for tensor in TENSORS[:3]:
        assert parameters.pop(tensor).kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for other in ("bias", "low_rank", "token_weight", "tp_group"):
        assert parameters.pop(other).default is None
    assert parameters.pop("temperature").default == 1.0
    assert [*parameters, *NO_KEYWORDS] == [*FIELDS]
    for option, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == FIELDS[option].default
        assert parameter.annotation == FIELDS[option].type


@pytest.mark.parametrize(("taker", "name"), ACCEPTED)
def test_options_are_accepted(taker: str, name: str) -> None:
    accept = TAKERS[taker][0]
    if (taker, name) == ("LinearCrossEntropy.__init__", "sequence_parallel"):
        with pytest.raises(ValueError, match="sequence_parallel=True needs a tp_group"):
            accept(sequence_parallel=True)
    else:
        assert getattr(accept(**{name: CHANGED[name]}), name) == CHANGED[name]


@pytest.mark.parametrize(
    "documented", [LinearCrossEntropy, linear_logprob, use_linear_cross_entropy]
)
def test_docstrings_list_the_options_that_are_accepted(documented: Any) -> None:
    pattern = r"\*\*options: (.*?),\s+as in ``linear_cross_entropy``"
    listed = re.search(pattern, documented.__doc__, re.DOTALL)
    assert listed is not None
    names = {*re.findall(r"\w+", listed[1])} - {"and"}
    assert names == {name for of, name in ACCEPTED if of.startswith(documented.__name__)}


@pytest.mark.parametrize(("taker", "name", "meant"), [
    *((taker, name, None) for taker in TAKERS for name in ("none", *sorted(TAKERS[taker][1]))),
    ("LinearCrossEntropy.__init__", "soft_cap", "softcap"),
    ("LinearCrossEntropy.__init__", "padded_vocabsize", "padded_vocab_size"),
    ("linear_logprob", "temperatur", "temperature"),
    ("linear_divergence", "betta", "beta"),
    ("use_linear_cross_entropy", "label_smoothig", "label_smoothing"),
])  # fmt: skip
def test_other_keywords_are_refused_as_python_does(taker: str, name: str, meant: Any) -> None:
    message = re.escape(f"{taker}() got an unexpected keyword argument '{name}'")
    ending = "" if meant is None else rf"\. Did you mean '{meant}'\?$"
    with pytest.raises(TypeError, match=f"^{message}{ending}"):
        TAKERS[taker][0](**{name: CHANGED.get(name)})


def test_a_misspelt_k_is_named() -> None:
    with pytest.raises(TypeError, match=r"linear_top_k\(\) got an unexpected keyword argument 'K'"):
        linear_top_k(torch.ones(2, 2), torch.ones(2, 2), K=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_cross_entropy_with_metrics"])
@pytest.mark.parametrize("fullgraph", [None, False, True])
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(
    name: str, fullgraph: bool | None
) -> None:
    """Called plainly, and from compiled code."""
    function, x, labels = getattr(flce_dist, name), torch.ones(2, 2), torch.zeros(2).long()

    def call(x: torch.Tensor) -> Any:
        return function(x, x, labels, soft_cap=3.0)

    if fullgraph is not None:
        call = torch.compile(call, backend="eager", fullgraph=fullgraph)
    said = rf"{name}\(\) got an unexpected keyword argument 'soft_cap'\. Did you mean 'softcap'\?"
    with pytest.raises(Exception, match=said) as error:
        call(x)
    assert fullgraph or type(error.value) is TypeError
