"""What a call issues, issued again without the Python that decides what to issue.

A call reads no data and waits for no device. So what it issues follows from facts: dtypes, shapes,
strides and alignment of its inputs, and what its caller adds. The second call with the same facts
is recorded: operations of torch, launches of kernels, collectives, and where each tensor dies. They
become the lines of a function without branches, which is what later calls run. A call that uses a
tensor which neither it nor its inputs brought, or whose shapes follow from data, is never replayed.
"""

import itertools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flce_dist.torch_private import DispatchMode

_T = TypeVar("_T")

_MOST_PROGRAMS = 16  # of one owner
_SCRATCH_BYTES = 1 << 16  # of one tensor
_ALIGNMENT = 256
_SEEN = object()  # in place of a program: facts of one call
_RESULTS: Any = (Tensor, tuple, list, type(None))
_PLAIN = (type(None), bool, int, str)
_NEVER = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip

_thread = threading.local()


def recorder() -> "Recorder | None":
    """Return what records this thread, if anything does."""
    return _thread.__dict__.get("recorder")  # getattr raises, and catches, where there is none


def replayed(
    programs: dict[Any, Any], facts: Any, inputs: Sequence[Tensor | None], issue: Callable[[], _T]
) -> _T:
    """Return ``issue()``, nested tuples of tensors and None, by a program if there is one.

    ``programs`` remembers them. ``facts``, hashable, are all that decides what is issued beside
    the metadata of ``inputs``.
    """
    if recorder() is not None:  # which would not see what a program issues
        return issue()
    key = facts, *[
        None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in inputs
    ]  # fmt: skip
    program = programs.get(key)
    if program is _SEEN:
        with Recorder(inputs) as noted:
            results = issue()
        programs[key] = noted.program(results)
        return results
    if program is not None:
        return program(*inputs)
    if key not in programs:
        if len(programs) == _MOST_PROGRAMS:
            programs.clear()
        programs[key] = _SEEN
    return issue()


def issued(function: Callable[..., _T], *args: Any) -> _T:
    """Return ``function(*args)``, which issues work in its own way, for example a collective.

    It must decide alike each time. What it returns is a tensor, None or an object whose methods
    and attributes are used in the same way.
    """
    noted = recorder()
    if noted is None:
        return function(*args)
    return noted.issued(noted.constant(function), function, args)


class Recorder(DispatchMode):
    """Writes a program line by line; its variables are tensors and ``Watched`` objects."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._first: dict[Any, str] = {}
        self._lines: list[str] = []
        self._variables = itertools.count()
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._small: dict[str, tuple[int, torch.device]] = {}  # what was allocated: bytes
        self._inputs = [f"x{i}" for i in range(len(inputs))]
        given = [(x, name) for x, name in zip(inputs, self._inputs, strict=True) if x is not None]
        self._fails = len({id(x) for x, _ in given}) < len(given)  # two may differ another time
        for x, name in given:
            self._name(x, name)

    def __enter__(self) -> "Recorder":
        _thread.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if recorder() is None:
            return func(*args, **kwargs)
        self._fails |= any(tag in func.tags for tag in _NEVER)
        name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
        name = "to" if name == "_to_copy" and kwargs.keys() == {"dtype"} else name
        # torch's function of the name, if there is one, parses its arguments in half the time.
        bound = getattr(torch, name, None) or getattr(Tensor, name, func)
        line = self._call(self.constant(bound), args, kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, _RESULTS):  # a fact, such as a dtype
            return result
        if func in _ALLOCATIONS:
            size, facts = list(result.shape), {"dtype": result.dtype, "device": result.device}
            line = self._call(self.constant(torch.empty_strided), (size, result.stride()), facts)
            if result.nbytes <= _SCRATCH_BYTES:
                self._small[self._target(result)] = result.nbytes, result.device
        elif func is _aten.slice.Tensor and args[1:2] in ((), (0,)) and len(args) < 5:
            start = slice(args[2] if len(args) > 2 else 0, None).indices(len(args[0]))[0]
            line = f"{self.expression(args[0])}[{start}:{start + len(result)}]"
        self._lines.append(f"{self._target(result)} = {line}")
        return result

    def once(self, function: Callable[..., Any], *args: Any) -> "Source":
        """Return what stands for ``function(*args)``, computed when the program begins."""
        line = f"c{len(self._first)} = {self._call(self.constant(function), args, {})}"
        line = self._first.setdefault((function, args), line)
        return Source(line.split()[0])

    def issued(
        self, source: str, function: Callable[..., Any], args: Sequence[Any],
        again: Sequence[Any] | None = None,
    ) -> Any:  # fmt: skip
        """Note and return ``function(*args)``, in the program ``source`` of ``again`` or args."""
        line = self._call(source, args if again is None else again, {})
        _thread.recorder = None
        try:
            result = function(*(x._of if x.__class__ is Watched else x for x in args))
        finally:
            _thread.recorder = self
        return self.noted(result, line)

    def noted(self, result: Any, line: str) -> Any:
        """Note that ``line`` yields ``result``; return that, or an object that notes its uses."""
        if not isinstance(result, Tensor | None):
            result = Watched(self, result)
        self._lines.append(f"{self._target(result)} = {line}")
        return result

    def program(self, results: Any) -> Callable[..., Any] | None:
        """Return the function of the inputs that does what was noted; None if it may not be."""
        returned = self.expression(results)
        self._names.clear()  # what dies from here on is no part of it
        if self._fails:
            return None
        head = f"def program({', '.join(self._inputs)}):"
        lines = self._in_scratch([*self._first.values(), *self._lines, f"return {returned}"])
        exec("\n ".join((head, *lines)), self._constants)
        return self._constants["program"]

    def _in_scratch(self, lines: list[str]) -> list[str]:
        """Let small tensors of which launches alone use the address share one allocation.

        The host takes as long for it as for one of them.
        """
        offset, devices = 0, {device for _, device in self._small.values()}
        for name, (nbytes, _) in self._small.items() if len(devices) == 1 else ():
            made = next(i for i, line in enumerate(lines) if line.startswith(f"{name} = "))
            rest = [x for i, x in enumerate(lines) if i != made and x != f"del {name}"]
            if not re.search(rf"\b{name}\b(?!\.data_ptr\(\))", "\n".join(rest)):
                lines = [re.sub(rf"\b{name}\.data_ptr\(\)", f"(a + {offset})", x) for x in rest]
                offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if offset:
            facts = {"dtype": torch.uint8, "device": devices.pop()}
            made_of = self._call(self.constant(torch.empty), [offset], facts)
            lines = [f"scratch = {made_of}", "a = scratch.data_ptr()", *lines]
        return lines

    def expression(self, x: Any) -> str:
        """Return x in the program's source."""
        if isinstance(x, Tensor | Watched):
            self._fails |= id(x) not in self._names
            return self._names.get(id(x), "None")
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return self._call(self.constant(type(x)), x, {})
        if isinstance(x, tuple | list):
            parts = "".join(f"{self.expression(each)}, " for each in x)
            return f"({parts})" if isinstance(x, tuple) else f"[{parts}]"
        if isinstance(x, Source):
            return x
        return repr(x) if isinstance(x, _PLAIN) else self.constant(x)

    def address(self, x: Tensor) -> "Source":
        """Return x's address in the program's source, of which a launch asks less than of x."""
        return Source(f"{self.expression(x)}.data_ptr()")

    def constant(self, x: Any) -> str:
        name = f"k{len(self._constants)}"
        self._constants[name] = x
        return name

    def _call(self, function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        parts = [self.expression(x) for x in args]
        parts += [f"{name}={self.expression(x)}" for name, x in kwargs.items()]
        return f"{function}({', '.join(parts)})"

    def _target(self, result: Any) -> str:
        if isinstance(result, tuple | list):
            return f"[{', '.join(self._target(x) for x in result)}]"
        if not isinstance(result, Tensor | Watched):
            return "_"
        return self._names.get(id(result)) or self._name(result, f"t{next(self._variables)}")

    def _name(self, x: Any, name: str) -> str:
        key = id(x)

        def died(_: Any) -> None:
            if self._names.pop(key, None) is not None:
                self._lines.append(f"del {name}")

        self._names[key], self._alive[key] = name, weakref.ref(x, died)
        return name


class Source(str):
    """A piece of the program."""


class Watched:
    """An object that was issued: notes which methods are called and which tensors are read."""

    def __init__(self, noted: Recorder, of: Any) -> None:
        self._noted, self._of = noted, of

    def __getattr__(self, name: str) -> Any:
        x = getattr(self._of, name)
        if callable(x):
            return partial(self._called, name)
        return self._noted.noted(x, self._source(name)) if isinstance(x, Tensor) else x

    def _called(self, name: str, *args: Any) -> Any:
        return self._noted.issued(self._source(name), getattr(self._of, name), args)

    def _source(self, name: str) -> str:
        return f"{self._noted.expression(self)}.{name}"
