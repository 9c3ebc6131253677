"""The op as torch.compile sees it: two opaque operators with fakes and a gradient.

``torch.ops.flce_dist.forward`` and ``.backward`` call what the Function of ``autograd.py`` calls.
They serve compiled code only: a call through the dispatcher and back into Python takes the host
longer than ``Function.apply``, which would delay small shapes.
"""

from typing import Any

import torch
from torch import Tensor

from flce_dist.kernels.column_cache import new_window
from flce_dist.kernels.filter_tiles import tile_grid
from flce_dist.op import checks
from flce_dist.op.autograd import run_backward, run_forward
from flce_dist.op.backward import Results
from flce_dist.op.forward import Metrics, shard_logits
from flce_dist.op.in_forward import saved_dtype
from flce_dist.op.prepare import Arguments, Call, Operands, prepare
from flce_dist.options import DECLARED, Declared, LossOptions
from flce_dist.parallel import collectives

_OPERANDS = "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? token_weight"
_TYPES = {bool: "bool", int: "int", float: "float", str: "str", tuple: "int[]"}


def _schema(name: str, declared: Declared) -> str:
    kind = _TYPES[declared.kind] + "?" * declared.optional
    if name == "max_logits_bytes":  # torch.compile may make it symbolic
        kind = f"Sym{kind.capitalize()}"
    return f"{kind} {name}"


_OPTIONS = [_schema(name, declared) for name, declared in DECLARED.items()]
_SPEC = ", ".join((*_OPTIONS, "str? group_name", "bool[] needs"))
_METRICS = len(Metrics._fields)
_DIFFERENTIABLE = 4  # the loss, lse, logprob, entropy


def apply(arguments: Arguments, needs: list[bool]) -> tuple[Tensor, ...]:
    """Call the operator from compiled code; return the loss and, if asked for, metrics.

    ``needs`` says whether hidden, weight and bias need a gradient.
    """
    options, tp_group = arguments.options, arguments.tp_group
    if options.accumulate_dweight and needs[1]:
        raise NotImplementedError(
            "accumulate_dweight=True is not supported under torch.compile, whose operators must "
            "not change their inputs; exclude the call by torch.compiler.disable"
        )
    if options.with_metrics and options.schedule == "in_forward":
        raise NotImplementedError(
            "under torch.compile linear_cross_entropy_with_metrics takes no "
            "schedule='in_forward'; use schedule='recompute'"
        )
    if options.with_metrics and options.filter_eps is not None and any(needs):
        # Compiled code passes zeros for upstream gradients that do not exist, so that backward
        # could not tell which to refuse.
        raise NotImplementedError(
            "under torch.compile linear_cross_entropy_with_metrics takes filter_eps only without "
            "gradients; use linear_cross_entropy, or exclude the call by torch.compiler.disable"
        )
    outputs = torch.ops.flce_dist.forward(
        *arguments[:5],
        *(getattr(options, name) for name in DECLARED),
        None if tp_group is None else tp_group.group_name,
        needs,
    )
    return tuple(outputs[: 1 + _METRICS] if options.with_metrics else outputs[:1])


def _prepare(operands: tuple[Any, ...], spec: tuple[Any, ...]) -> tuple[Call, Operands]:
    hidden, weight, labels, bias, token_weight = operands
    *options, group_name, needs = spec
    group = collectives.group_of(group_name)
    arguments = Arguments(hidden, weight, labels, bias, token_weight, LossOptions(*options), group)
    # A plan of symbolic sizes determines the shapes that an operator returns, and cannot tell
    # whether dweight's memory is large enough for in_forward.
    return prepare(arguments, needs, auto_in_forward=False)


def _present(tensors: Any, like: Tensor) -> list[Tensor]:
    """Operators return tensors: an empty one stands for None."""
    return [like.new_empty(0) if x is None else x for x in tensors]


@torch.library.custom_op(
    "flce_dist::forward", mutates_args=(), schema=f"({_OPERANDS}, {_SPEC}) -> Tensor[]"
)
def _forward(hidden, weight, labels, bias, token_weight, *spec):
    """Return loss and metrics (empty if not asked for), then what is saved."""
    call, operands = _prepare((hidden, weight, labels, bias, token_weight), spec)
    checks.check_labels(operands.labels, call.vocab_size, call.options.ignore_index)
    needs, shape = spec[-1], labels.shape
    with torch.no_grad():
        loss, metrics, saved = run_forward(call, operands, needs)
    outputs = [loss.reshape(shape) if call.options.reduction == "none" else loss]
    of_tokens = [x if x is None else x.reshape(shape) for x in metrics[:4]]
    outputs += _present([*of_tokens, *metrics[4:]], loss)
    return outputs + (_present(saved, loss) if any(needs) else [])


@_forward.register_fake
def _(hidden, weight, labels, bias, token_weight, *spec):
    call, operands = _prepare((hidden, weight, labels, bias, token_weight), spec)
    flat = operands.hidden
    logits = shard_logits(call, flat, weight, bias, operands.labels)
    T, V = labels.numel(), weight.shape[0]

    def new(*shape):
        return hidden.new_empty(shape, dtype=logits.stats_dtype)

    outputs = [new(*labels.shape) if call.options.reduction == "none" else new()]
    if call.options.with_metrics:
        outputs += [new(*labels.shape) for _ in range(_DIFFERENTIABLE - 1)]
        outputs += [torch.empty_like(labels, dtype=torch.bool), new(), new()]
    else:
        outputs += [new(0) for _ in range(_METRICS)]
    need_hidden, need_weight, need_bias = needs = spec[-1]
    if not any(needs):
        return outputs
    if call.plan.schedule == "in_forward":
        dhidden = torch.empty_like(flat, memory_format=torch.contiguous_format)
        late_norm = call.options.reduction == "mean" and hidden.dtype == torch.float16
        outputs += [new() if late_norm else new(0), dhidden if need_hidden else new(0)]
        dtype = saved_dtype(weight.dtype)
        outputs += [weight.new_empty(weight.shape, dtype=dtype) if need_weight else new(0)]
        return [*outputs, new(V) if need_bias else new(0)]
    columns = call.plan.cached_columns(call.V, T * logits.cache_dtype.itemsize)
    cache = new_window(T, columns, logits.cache_dtype, hidden.device) if columns else new(0)
    entropy = new(T) if call.options.with_metrics else new(0)
    norm = new() if call.options.reduction == "mean" else new(0)
    kept, mass = new(0), new(0)
    if call.plan.schedule == "filtered":
        blocks, tiles = tile_grid(T, call.V)
        kept, mass = flat.new_empty(blocks, tiles, dtype=torch.bool), flat.new_empty(tiles, T)
    return [*outputs, norm, cache, entropy, new(T), new(T), new(T), kept, mass]


@torch.library.custom_op(
    "flce_dist::backward",
    mutates_args=(),
    schema=(
        "(Tensor? dloss, Tensor? dlse, Tensor? dlogprob, Tensor? dentropy, "
        f"{_OPERANDS}, Tensor[] saved, {_SPEC}) -> Tensor[]"
    ),
)
def _backward(
    dloss, dlse, dlogprob, dentropy, hidden, weight, labels, bias, token_weight, saved, *spec
):
    """Return dhidden, dweight, dbias, each in its operand's shape; empty if not needed."""
    call, operands = _prepare((hidden, weight, labels, bias, token_weight), spec)
    needs = spec[-1]
    kept: list[Any] = [x if x.numel() else None for x in saved]
    upstream = [
        g if g is None or g.dim() == 0 else g.reshape(-1) for g in (dloss, dlse, dlogprob, dentropy)
    ]
    gradients: Results = (None, None, None)
    if labels.numel():  # without tokens, statistics are as empty as those that stand for None
        tensors = (*kept, *operands)
        with torch.no_grad():  # an operator must not return its inputs
            gradients = run_backward(call, tensors, upstream, needs, reuses_saved=False)
    # A needed gradient that is None here is one without elements, or without tokens: zeros.
    return [
        hidden.new_empty(0) if not need else torch.zeros_like(x) if g is None else g.view(x.shape)
        for g, x, need in zip(gradients, (hidden, weight, bias), needs, strict=True)
    ]


@_backward.register_fake
def _(dloss, dlse, dlogprob, dentropy, hidden, weight, labels, bias, token_weight, saved, *spec):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else hidden.new_empty(0)
        for x, need in zip((hidden, weight, bias), spec[-1], strict=True)
    ]


def _setup_context(ctx, inputs, output):
    hidden, weight, labels, bias, token_weight, *ctx.spec = inputs
    ctx.set_materialize_grads(False)
    saved = output[1 + _METRICS :]
    ctx.save_for_backward(hidden, weight, labels, bias, token_weight, *saved)


def _differentiate(ctx, grads):
    operands, saved = ctx.saved_tensors[:5], list(ctx.saved_tensors[5:])
    needs, with_metrics = ctx.spec[-1], LossOptions(*ctx.spec[:-2]).with_metrics
    # Compiled code passes zeros for upstream gradients that do not exist.
    upstream = grads[:_DIFFERENTIABLE] if with_metrics else (grads[0], None, None, None)
    if all(g is None for g in upstream):
        return (None,) * (5 + len(ctx.spec))
    gradients = torch.ops.flce_dist.backward(*upstream, *operands, saved, *ctx.spec)
    dhidden, dweight, dbias = (g if n else None for g, n in zip(gradients, needs, strict=True))
    return dhidden, dweight, None, dbias, None, *(None for _ in ctx.spec)


_forward.register_autograd(_differentiate, setup_context=_setup_context)
