"""Triton's interpreter without work that it repeats: the same bits in a third of the time.

It is Python, and tiles of tests are small: nearly all of its time goes into types and shapes.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton
from triton import language as tl
from triton.runtime import interpreter

RELEASE = "3.7."
"""Of Triton, whose private functions are replaced; others interpret as they are, slowly."""


def make_fast(patch: pytest.MonkeyPatch) -> None:
    """Replace functions of the interpreter until ``patch`` is undone, in the release known here."""
    if not triton.__version__.startswith(RELEASE):
        return
    patch_language_once_a_launch(patch)
    remember_types(patch)
    remember_operands(patch)
    check_no_overflow(patch)


def patch_language_once_a_launch(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches triton.language at each call of a device function.

    Once a launch is enough: only the end of a launch undoes it.
    """
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    @functools.cache
    def languages(fn: Any) -> set[int]:
        return {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}

    def once(fn: Any) -> Any:
        if languages(fn) <= patched:
            return None
        patched.update(languages(fn))
        return patch_language(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", once)
    patch.setattr(interpreter.GridExecutor, "__call__", call)


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """Nearly every tile has the type of an earlier one; types are alike if their names are."""
    np_dtype = interpreter._get_np_dtype
    init_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    np_dtypes: dict[str, Any] = {}
    types: dict[tuple, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def known_np_dtype(type: Any) -> Any:
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype(type)
        return np_dtypes[type.name]

    def init_known_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def init_tensor_of_known_type(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, handle, type)
            tensors[type.name] = {**vars(self), "handle": None}
        vars(self).update(tensors[type.name], handle=handle, type=type)

    patch.setattr(interpreter, "_get_np_dtype", known_np_dtype)
    patch.setattr(tl.block_type, "__init__", init_known_type)
    patch.setattr(tl.tensor, "__init__", init_tensor_of_known_type)


def remember_operands(patch: pytest.MonkeyPatch) -> None:
    """How operands are cast and broadcast follows from their types, and from a number's value."""
    semantic = interpreter.interpreter_semantic
    prepare, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    numbers: dict[tuple, Any] = {}
    pairs: dict[tuple, tuple[Any, Any]] = {}

    def prepare_known(lhs: Any, rhs: Any, *flags: bool, **more: bool) -> tuple[Any, Any]:
        call = functools.partial(prepare, lhs, rhs, *flags, **more)
        left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if left and right:
            return convert(lhs, rhs, call, (*flags, *more.items()))
        if not left and not right:
            return call()
        tile, number = (lhs, rhs) if left else (rhs, lhs)
        key = (tile.type.name, repr(number), left, *flags, *more.items())
        if key not in numbers:
            operands = call()
            if operands[right] is not tile:  # cast to the number's type
                return operands
            operands[left].handle.data.flags.writeable = False
            numbers[key] = operands[left]
        return (tile, numbers[key]) if left else (numbers[key], tile)

    def broadcast_known(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return convert(lhs, rhs, functools.partial(broadcast, lhs, rhs), ("broadcast",))

    def convert(lhs: Any, rhs: Any, call: Any, how: tuple) -> tuple[Any, Any]:
        """What ``call`` returns, which depends on ``how`` and both types alone."""
        key = (lhs.type.name, rhs.type.name, *how)
        if key not in pairs:
            operands = call()
            pairs[key] = operands[0].type, operands[1].type
            return operands
        left, right = pairs[key]
        return to_type(lhs, left), to_type(rhs, right)

    def to_type(x: Any, type: Any) -> Any:
        if x.dtype.name != type.scalar.name:
            x = semantic.cast(x, type.scalar)
        if x.type.name == type.name:
            return x
        data = np.broadcast_to(x.handle.data, type.shape)
        return tl.tensor(interpreter.TensorHandle(data, type.scalar), type)

    patch.setattr(semantic, "binary_op_type_checking_impl", prepare_known)
    patch.setattr(semantic, "broadcast_impl_value", broadcast_known)


def check_no_overflow(patch: pytest.MonkeyPatch) -> None:
    """Integers that overflow are found for an assertion that is off: it needs ``debug``, too."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
