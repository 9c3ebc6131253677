"""What builtins of Triton ask its interpreter for, as functions that ask NumPy for the same."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


class Recorder:
    """The builder during one call of a builtin: a function is made of what it is asked for.

    It passes arrays on without handles, and splats only those that NumPy does not broadcast.
    """

    handles = tuple(x for name, x in vars(interpreter).items() if name.endswith("Handle"))

    def __init__(self, builder: Any, given: list[Any]) -> None:
        self.builder = builder
        self.alive = given  # names are by id
        self.arguments = [f"x{i}" for i in range(len(given))]
        self.names = {id(x): name for x, name in zip(given, self.arguments, strict=True)}
        self.arrays: dict[int, str] = {}  # of handles
        self.narrow: dict[int, tuple[str, Any]] = {}  # arrays before they are splatted
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {"new": object.__new__, "tensor": tl.tensor}
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.builder, name)
        if not inspect.ismethod(found):
            return found
        if found.__name__ == "<lambda>":  # one of the operations below
            return functools.partial(found.__func__, self)
        return functools.partial(self.call, name, found)

    def call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        line = f"{self.constant(method)}({', '.join(map(self.expression, args))})"
        result = method(*args)
        self.alive.append(result)
        if name.startswith("get_"):
            self.names[id(result)] = self.constant(result)
            if isinstance(result, self.handles):
                self.arrays[id(result)] = self.constant(result.data)
        elif isinstance(result, self.handles):
            self.names[id(result)] = self.line(line)
        else:
            self.lines.append(line)
        return result

    # What nearly all programs consist of.

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        return self.elementwise(op, self.builder.binary_op(lhs, rhs, op), lhs, rhs)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Callable[..., Any]) -> Any:
        result = self.builder.ternary_op(lhs, rhs, other, op)
        return self.elementwise(op, result, lhs, rhs, other)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        return self.elementwise(op, self.builder.unary_op(arg, op), arg)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        result = self.builder.cast_impl(src, dst_type)
        to = result.data.dtype
        halves = {src.dtype.scalar, dst_type.scalar}
        if halves == {tl.bfloat16, tl.float32}:
            return self.made(f"{self.constant(truncated[to.name])}({self.array(src)})", result, src)
        return self.made(f"{self.array(src)}.astype({self.constant(to)})", result, src)

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        result = self.builder.create_addptr(ptr, offset)
        return self.elementwise(lambda p, x: p + size * x.astype(np.uint64), result, ptr, offset)

    def create_reshape(self, arg: Any, shape: Any, *how: Any) -> Any:
        result = self.builder.create_reshape(arg, shape, *how)
        return self.made(f"{self.array(arg)}.reshape({result.data.shape})", result, arg)

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        result = self.builder.create_expand_dims(arg, axis)
        return self.made(f"{self.array(arg)}.reshape({result.data.shape})", result, arg)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        return self.spread(self.builder.create_splat(ret_ty, arg), arg)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        return self.spread(self.builder.create_broadcast(arg, shape), arg)

    def create_load(self, ptr: Any, *how: Any) -> Any:
        return self.create_masked_load(ptr, self.filled(np.ones, ptr, tl.int1), None, *how)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *how: Any) -> Any:
        result = self.builder.create_masked_load(ptrs, mask, other, *how)
        if other is None:  # a handle is false if it holds a 0
            other = self.filled(np.zeros, ptrs, result.dtype)
        arrays = map(self.array, (ptrs, mask, other))
        load = self.constant(interpreter._interpreter.load)
        dtype = self.constant(result.data.dtype)
        return self.made(f"{load}({', '.join(arrays)}, {dtype})", result)

    def create_store(self, ptr: Any, value: Any, *how: Any) -> None:
        self.create_masked_store(ptr, value, self.filled(np.ones, ptr, tl.int1), *how)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *how: Any) -> None:
        self.builder.create_masked_store(ptrs, value, mask, *how)
        arrays = ", ".join(map(self.array, (ptrs, value, mask)))
        self.lines.append(f"{self.constant(interpreter._interpreter.store)}({arrays})")

    def elementwise(self, op: Callable[..., Any], result: Any, *args: Any) -> Any:
        narrow = [self.narrow.get(id(x), ("", x.data)) for x in args]
        before = op(*[x for _, x in narrow])
        names = [name or self.array(x) for (name, _), x in zip(narrow, args, strict=True)]
        if (before.shape, before.strides) != (result.data.shape, result.data.strides):
            before = op(*[x.data for x in args])
            names = list(map(self.array, args))
        expression = f"{self.constant(op)}({', '.join(names)})"
        if before.dtype != result.data.dtype:
            expression += f".astype({self.constant(result.data.dtype)})"
        if result.data.dtype == bool:
            result.dtype = tl.int1
        return self.made(expression, result, *args)

    def spread(self, result: Any, arg: Any) -> Any:
        """Return the handle of data that are ``arg``'s once more along some dimensions."""
        name, x = self.narrow.get(id(arg)) or (self.array(arg), arg.data)
        if x.dtype != result.data.dtype:
            name = self.line(f"{name}.astype('{result.data.dtype}')")
            x = x.astype(result.data.dtype)
        self.alive.append(result)
        self.narrow[id(result)] = name, x
        return result

    def filled(self, make: Callable[..., Any], like: Any, dtype: Any) -> Any:
        """Return the handle of ones or zeros."""
        data = make(like.data.shape, interpreter._get_np_dtype(dtype))
        handle = interpreter.TensorHandle(data, dtype)
        self.alive.append(handle)
        self.arrays[id(handle)] = self.constant(data)
        return handle

    def made(self, expression: str, result: Any, *args: Any) -> Any:
        """Return the handle of data that ``expression`` makes, of those of ``args`` alone."""
        self.alive.append(result)
        names = [self.arrays.get(id(x)) or self.narrow.get(id(x), " ")[0] for x in args]
        fixed = names and all(name.startswith("k") for name in names)
        self.arrays[id(result)] = self.constant(result.data) if fixed else self.line(expression)
        return result

    # Names, which begin with x, k or r: arguments, constants, what lines make.

    def line(self, expression: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, x: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = x
        return name

    def array(self, x: Any) -> str:
        if id(x) not in self.arrays:
            if id(x) in self.narrow:
                name, _ = self.narrow[id(x)]
                fixed = name.startswith("k")
                shape = self.constant(x.data.shape)
                again = f"{self.constant(splatted)}({name}, {shape})"
                self.arrays[id(x)] = self.constant(x.data) if fixed else self.line(again)
            else:
                self.arrays[id(x)] = self.line(f"{self.expression(x)}.data")
        return self.arrays[id(x)]

    def expression(self, x: Any) -> str:
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(self.expression, x))}]"
        if id(x) not in self.names and (id(x) in self.arrays or id(x) in self.narrow):
            handle = self.constant(interpreter.TensorHandle)
            dtype = self.constant(x.dtype)
            self.names[id(x)] = self.line(f"{handle}({self.array(x)}, {dtype})")
        name = self.names.get(id(x))
        self.fails |= name is None and isinstance(x, self.handles)  # it was made in another way
        return name or self.constant(x)

    def program(self, result: Any) -> Callable[..., Any] | None:
        """Return the function of handles that returns a tensor like ``result``, if it is one."""
        if result.__class__ is not tl.tensor:
            return None
        attributes = self.constant(dict(vars(result)))
        handle = self.expression(result.handle)
        lines = [
            f"def program({', '.join(self.arguments)}):",
            *self.lines,
            "result = new(tensor)",
            f"result.__dict__ = {{**{attributes}, 'handle': {handle}}}",
            "return result",
        ]
        exec(code("\n ".join(lines)), self.constants)
        return None if self.fails else self.constants["program"]


@functools.cache
def code(source: str) -> Any:
    return compile(source, "<program>", "exec")


def splatted(x: Any, shape: tuple[int, ...]) -> Any:
    out = np.empty(shape, x.dtype)
    out[...] = x
    return out


truncated: dict[str, Callable[[Any], Any]] = {
    "uint16": lambda x: (x.view(np.uint32) >> 16).astype(np.uint16, "C"),
    "float32": lambda x: (x.astype(np.uint32, "C") << 16).view(np.float32),
}
"""Between fp32 and bf16, as Triton's own do slowly, which differ where numbers are subnormal."""
