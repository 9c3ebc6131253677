"""Draw a call of random shapes, strides, dtypes, options and ranks, and compare it."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import HealthCheck
from torch import Tensor

from flce_dist import linear_cross_entropy_with_metrics
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.outcomes import Outcome
from tests.parallel_problem import joined
from tests.problems import (
    DTYPES,
    IGNORE,
    METRICS,
    Inputs,
    Upstream,
    compare,
    make_inputs,
    run,
)

# The same examples in every run, so that a failure is the fault of the change under test.
SETTINGS: dict[str, Any] = dict(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Drawn:
    """One call: ``T = P * tokens`` tokens as [s, b], V_all vocabulary rows, and padding."""

    P: int = 1
    tokens: int = 12
    batch: int = 2
    H: int = 24
    V_all: int = 90
    padding: int = 0
    dtype: torch.dtype = torch.float32
    layouts: tuple[str, str] = ("plain", "plain")  # of hidden and weight
    int32_labels: bool = False
    ignored: float = 0.2
    flagged: bool = False  # the first token's label is so unlikely that its others are rescued
    bias: bool = True
    token_weight: bool = False
    temperature: float | None = 1.0  # None: one of each token
    metric_gradients: bool = False
    sequence_parallel: bool = False
    seed: int = 0
    reduction: str = "mean"
    options: tuple[tuple[str, Any], ...] = ()  # of the loss
    how: tuple[tuple[str, Any], ...] = ()  # schedule, max_logits_bytes


@st.composite
def calls(draw: st.DrawFn, max_P: int = 8, sizes: int = 40) -> Drawn:
    """Every combination that the op supports."""
    P = draw(st.sampled_from([p for p in (1, 2, 3, 4, 8) if p <= max_P]))
    softcap = draw(st.sampled_from([None, None, 3.0, 30.0]))
    smoothing = draw(st.sampled_from([0.0, 0.1]))  # 1.0 lets whole gradients cancel
    reduction = draw(st.sampled_from(["none", "sum", "mean"]))
    schedules = ["recompute", "auto"]
    if not (softcap and smoothing):
        schedules.append("cached")
        if reduction != "none":
            schedules.append("in_forward")
    schedule = draw(st.sampled_from(schedules))
    dtype = draw(st.sampled_from([*DTYPES, torch.float64][: 4 if max_P > 1 else 3]))
    least = 1 if dtype.itemsize > 2 else 8  # few terms may cancel, their rounding errors not
    layouts = st.sampled_from(["plain", "columns", "transposed", "every second"])
    return Drawn(
        P=P,
        tokens=draw(st.integers(0, max(1, sizes // (2 * P)))),
        batch=draw(st.integers(1, 3)),
        H=draw(st.integers(least, sizes)),
        V_all=draw(st.integers(3 * least, 3 * sizes)),
        padding=draw(st.sampled_from([0, 0, 1, 13])),
        dtype=dtype,
        layouts=(draw(layouts), draw(layouts)),
        int32_labels=draw(st.booleans()),
        ignored=draw(st.sampled_from([0.0, 0.2, 1.0])),
        bias=draw(st.booleans()),
        token_weight=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 1.0, 0.7, None])),
        metric_gradients=schedule != "in_forward" and draw(st.booleans()),
        sequence_parallel=P > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        reduction=reduction,
        options=(
            ("softcap", softcap),
            ("label_smoothing", smoothing),
            ("z_loss_weight", draw(st.sampled_from([0.0, 1e-2]))),
            ("logit_scale", draw(st.sampled_from([1.0, 0.5, -1.3]))),
        ),
        how=(("schedule", schedule), ("max_logits_bytes", draw(st.sampled_from([None, 1, 4096])))),
    )


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides, the gaps filled with NaN."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "columns":  # of a wider matrix, off its alignment
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
        wide[..., 1 : 1 + x.shape[-1]] = x
        return wide[..., 1 : 1 + x.shape[-1]]
    if layout == "every second":
        long = x.new_full((2 * x.shape[0], *x.shape[1:]), torch.nan)
        long[::2] = x
        return long[::2]
    return x


def inputs_of(drawn: Drawn) -> Inputs:
    """The whole inputs: hidden [s, b, H], weight and bias with padding rows, the others [s, b]."""
    s, b = drawn.P * drawn.tokens, drawn.batch
    flat = make_inputs(
        s * b, drawn.V_all + drawn.padding, drawn.H, drawn.dtype, seed=drawn.seed,
        bias=drawn.bias, token_weight=drawn.token_weight, ignored=drawn.ignored,
        temperature=drawn.temperature is None,
    )  # fmt: skip
    labels = flat.labels.where(flat.labels == IGNORE, flat.labels % drawn.V_all)
    if drawn.flagged:
        labels[0] = drawn.V_all - 1
        flat.hidden[0] = -40 * flat.weight[labels[0]]
    weights = None if flat.token_weight is None else flat.token_weight.view(s, b)
    temperature: Any = drawn.temperature
    if isinstance(flat.temperature, Tensor):  # of ignored tokens it is not read
        temperature = flat.temperature.masked_fill(labels == IGNORE, 0.0).view(s, b)
    return replace(
        flat, hidden=flat.hidden.view(s, b, drawn.H), labels=labels.view(s, b),
        token_weight=weights, temperature=temperature,
    )  # fmt: skip


def upstream_of(drawn: Drawn) -> Upstream:
    shape = (drawn.P * drawn.tokens, drawn.batch)
    g = torch.Generator().manual_seed(drawn.seed)
    dloss = torch.randn(shape if drawn.reduction == "none" else (), generator=g)
    dmetrics = {name: torch.randn(shape, generator=g) for name in METRICS}
    return Upstream(dloss, dmetrics if drawn.metric_gradients else None)


def options_of(drawn: Drawn) -> dict[str, Any]:
    return {"vocab_size": drawn.V_all, "reduction": drawn.reduction, **dict(drawn.options)}


def rank_step(
    group: dist.ProcessGroup | None, drawn: Drawn, whole: Inputs, impl: Any, device: str
) -> Outcome:
    """Call the op on this rank's share of the whole inputs, which is moved to ``device``."""
    P, rank = (1, 0) if group is None else (group.size(), group.rank())
    rows = vocab_range(len(whole.weight), rank, P)
    anything = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).repeat(drawn.H)[: drawn.H]
    ignored = (whole.labels == IGNORE)[..., None]
    hidden = anything.to(whole.dtype).where(ignored, whole.hidden)
    hidden = hidden.tensor_split(P)[rank] if drawn.sequence_parallel else hidden
    bias = None if whole.bias is None else whole.bias[slice(*rows)]
    share = replace(whole, hidden=hidden, weight=whole.weight[slice(*rows)], bias=bias)

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, **keywords: Any) -> tuple:
        hidden, weight = map(laid_out, (hidden, weight), drawn.layouts)
        labels = labels.to(torch.int32 if drawn.int32_labels else torch.int64).t().contiguous().t()
        return linear_cross_entropy_with_metrics(hidden, weight, labels, **keywords)

    how = {
        "vocab_range": rows,
        "tp_group": group,
        "sequence_parallel": drawn.sequence_parallel,
        "reduce_in_fp32": True,  # where shares cancel their rounding errors do not
        "impl": impl,
        **dict(drawn.how),
        **options_of(drawn),
    }
    found = run(call, share.to(torch.device(device)), upstream_of(drawn), twice=True, **how)
    return Outcome({name: x.cpu() for name, x in found.items()})


def check_on_ranks(drawn: Drawn, impl: str = "eager", device: str = "cpu") -> None:
    whole = inputs_of(drawn)
    if drawn.P == 1:
        ranks = [rank_step(None, drawn, whole, impl, device)]
    else:
        ranks = run_ranks(lambda group: rank_step(group, drawn, whole, impl, device), drawn.P)
    found = joined(ranks, sequence_parallel=drawn.sequence_parallel)
    compare(found, whole, upstream_of(drawn), with_metrics=True, **options_of(drawn))
