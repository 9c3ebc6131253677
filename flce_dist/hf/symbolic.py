"""Logits [..., V] inside the forward of a model: not made until something needs their values.

The output layer's call is put off. Either the loss takes it, and the layer is called once, with
all its hooks, to compute that; or the model asks for what a cross entropy cannot contain
(``steps``), and the layer is called once for real logits, whose loss is the model's own. When
the forward ends, so do its symbolic logits: none is in the output, and one that was kept raises.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.hf.layers import LayerOperands, loss_of, operands
from flce_dist.hf.stand_in import NO_LOGITS
from flce_dist.hf.steps import STEPS, Formula

_METADATA = {Tensor.size, Tensor.dim, Tensor.is_floating_point} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "grad_fn")
}
"""Functions that need no values."""


class Recording:
    """One forward of a model with labels.

    Args:
        keywords: of ``linear_cross_entropy``, as the user gave them.
        warn: takes a reason for logits that nobody asked for.
        wants_logits: whether the output has real logits beside the loss.
        is_training: whether the model is, whose mean over no label is 0; else it is NaN.
    """

    def __init__(
        self,
        keywords: dict[str, Any],
        warn: Callable[[str], None],
        *,
        wants_logits: bool,
        is_training: bool,
    ) -> None:
        self.keywords = keywords
        self.warn = warn
        self.wants_logits = wants_logits
        self.is_training = is_training
        self.is_over = False
        self.calls: list[LayerCall] = []

    def logits_of(self, layer: Any, hidden: Tensor) -> "SymbolicLogits":
        """Return what ``layer`` is to make of hidden [..., H]."""
        call = LayerCall(self, layer, hidden)
        self.calls.append(call)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        shape = (*hidden.shape[:-1], layer.out_features)
        blank = torch.empty(shape, dtype=dtype, device="meta")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Autograd in C++ does not ask __torch_function__: then backward raises, for a gradient
            # on another device than "meta", instead of losing the gradient.
            blank.requires_grad_()
        return blank.as_subclass(SymbolicLogits).of(call, Formula(), None)

    def finished(self, output: Any) -> Any:
        """Return the output of the forward without symbolic logits."""
        return _replaced(output, self._returned)

    def end(self) -> None:
        """End symbolic logits with the forward, and the cycles of references that they are in.

        These would keep hidden states, and real logits, until Python collects its garbage.
        """
        self.is_over = True
        for call in self.calls:
            call.made.clear()
        self.calls.clear()

    def _returned(self, logits: "SymbolicLogits") -> Any:
        if logits.call.values is None and logits.call.is_in_loss:
            return NO_LOGITS
        return real(logits, "no loss of the model took them")


class LayerCall:
    """One call of the output layer, which is made when its result is known to be needed."""

    def __init__(self, recording: Recording, layer: Any, hidden: Tensor) -> None:
        self.recording = recording
        self.layer = layer
        self.hidden = hidden  # as the model passed it; then as the layer's pre-hooks changed it
        self.needs_grad = torch.is_grad_enabled()
        self.is_in_loss = False
        self.operands: LayerOperands | None = None  # of all losses: of one dropout mask of LoRA
        self.values: Tensor | None = None  # the layer's real logits
        self.made: list[SymbolicLogits] = []  # in the order in which the model made them

    def check_is_open(self) -> None:
        if self.recording.is_over:
            raise RuntimeError(
                "these logits belong to a forward of the model that is over, and were not computed "
                "in it; call the model with logits=True, or without labels"
            )

    def may_be_in_loss(self) -> bool:
        """Whether steps and losses need no values: not if others are made of real logits already,
        nor where a function of autograd, or the model, has turned gradients off."""
        is_real = self.values is not None and not self.is_in_loss
        return not is_real and torch.is_grad_enabled() == self.needs_grad

    def make_values(self, why: str) -> Tensor:
        """Return the layer's real logits, with a warning if these are not in the output anyway."""
        if self.values is None:
            self.recording.warn(why)
            with torch.set_grad_enabled(self.needs_grad):
                if self.operands is not None:  # its hooks have run
                    self.values = self.layer.logits_without_hooks(self.hidden, self.operands)
                else:
                    self.values = self.layer.called(self.hidden)
        return self.values

    def loss(self, formula: Formula, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss of labels [T]; the first one calls the layer, and maybe makes logits."""

        def compute(hidden: Tensor) -> Tensor:
            self.hidden = hidden
            self.operands = operands(self.layer, hidden)
            if self.recording.wants_logits and self.values is None:
                self.values = self.layer.logits_in_its_call(hidden, self.operands)
            return of(self.operands)

        def of(operands: LayerOperands) -> Tensor:
            keywords = {**options, **self.recording.keywords}
            loss = loss_of(operands, labels, formula, keywords)
            if self.recording.is_training or options.get("reduction", "mean") != "mean":
                return loss
            counts = (labels != options.get("ignore_index", -100)).any()
            return loss.where(counts, torch.nan)  # which averages over batches leave out

        self.is_in_loss = True
        if self.operands is not None and not self.layer.needs_its_hooks():
            return of(self.operands)
        return self.layer.called(self.hidden, compute=compute)


class SymbolicLogits(Tensor):
    """Logits without values (on the meta device), and what the model has done to them."""

    call: LayerCall
    formula: Formula
    origin: tuple[Any, ...] | None  # the function, the logits and other arguments that made these
    computed: Tensor | None

    def of(self, call: LayerCall, formula: Formula, origin: Any) -> "SymbolicLogits":
        self.call = call
        self.formula = formula
        self.origin = origin
        self.computed = None
        call.made.append(self)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        logits = args[0] if args else None
        if not isinstance(logits, SymbolicLogits):
            return _with_real(func, args, kwargs)
        logits.call.check_is_open()
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if func == Tensor.device.__get__:
            return logits.call.hidden.device
        if logits.call.may_be_in_loss():
            if func is F.cross_entropy:
                options = _options_of_loss(logits, args[1:], kwargs)
                if options is not None:
                    return logits.call.loss(logits.formula, args[1], **options)
            elif name in STEPS and not kwargs:
                formula = STEPS[name](logits.formula, logits, list(args[1:]))
                if formula is not None:
                    blank = super().__torch_function__(func, types, _for_meta(name, args))
                    is_same = blank is logits  # ``float`` of what is fp32
                    return logits if is_same else blank.of(logits.call, formula, (func, *args))
        return _with_real(func, args, kwargs)


def _for_meta(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a step for logits without values, which stay on their device."""
    if name != "to":
        return args
    dtypes = [x for x in args[1:] if isinstance(x, torch.dtype)]
    return (args[0], *(dtypes or [args[0].dtype]))


def _options_of_loss(
    logits: SymbolicLogits, labels: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the options of this cross entropy; None if it is not one that can be fused."""
    if len(labels) != 1 or labels[0].dim() != 1 or logits.dim() != 2:
        return None
    unset = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
    options = {name: x for name, x in kwargs.items() if unset.get(name, ...) != x}
    return options if options.keys() <= {"ignore_index", "reduction"} else None


def _with_real(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return ``func`` of real logits."""
    why = f"the model asks for {func.__name__} of its logits"
    name = func.__name__
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        for logits in [x for x in args if isinstance(x, SymbolicLogits)]:
            for made in logits.call.made:  # before those are changed that they are made of
                real(made, why)
    args = _replaced(args, lambda x: real(x, why))
    return func(*args, **_replaced(dict(kwargs), lambda x: real(x, why)))


def real(logits: SymbolicLogits, why: str) -> Tensor:
    """Return the values, in the grad mode of the layer's call if the model has made none yet."""
    if logits.computed is None:
        logits.call.check_is_open()
        if logits.origin is None:
            logits.computed = logits.call.make_values(why)
        else:
            func, made_of, *others = logits.origin
            source = real(made_of, why)
            with torch.set_grad_enabled(logits.call.needs_grad):
                logits.computed = func(source, *others)
    return logits.computed


def _replaced(x: Any, replace: Callable[[SymbolicLogits], Any]) -> Any:
    """Return ``x`` with symbolic logits replaced, in its dicts, dataclasses, lists and tuples."""
    if isinstance(x, SymbolicLogits):
        return replace(x)
    if isinstance(x, dict):
        for key, value in x.items():
            if _holds(value):
                x[key] = _replaced(value, replace)
        return x
    if isinstance(x, (list, tuple)):
        values = [_replaced(value, replace) for value in x]
        if all(map(operator.is_, values, x)):
            return x
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        for name, value in vars(x).items():
            if _holds(value):
                setattr(x, name, _replaced(value, replace))
    return x


def _holds(x: Any) -> bool:
    """Whether symbolic logits may be within."""
    kinds = (SymbolicLogits, dict, list, tuple)  # the Dynamo of torch 2.9 knows no union of them
    return isinstance(x, kinds) or dataclasses.is_dataclass(x)
