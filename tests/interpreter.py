"""Triton's interpreter with NumPy of today and without work that it repeats: five times as fast.

It is Python, and tiles of tests are small: nearly all of its time goes into types and shapes.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton
from triton import language as tl
from triton.runtime import interpreter

RELEASES = "3.6.", "3.7.", "3.8."
"""Of Triton, whose private functions are replaced; others interpret as they are, slowly."""

OPERATIONS = (
    "add", "sub", "mul", "truediv", "and_", "or_", "minimum", "maximum",
    "less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal",
)  # fmt: skip


def mend() -> None:
    """Do in every release what that of Triton 3.7 does."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        # Before 3.7 tiles [1] are read by int(tile), which NumPy refuses since 2.4.
        set_attr = scope[0].set_attr if scope else setattr
        set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch
    if triton.__version__.startswith("3.5."):  # which takes strides in elements for bytes
        interpreter.TensorDescHandle.validate = lambda self: None


def make_fast(patch: pytest.MonkeyPatch) -> None:
    """Replace functions of the interpreter until ``patch`` is undone, in releases known here."""
    if not triton.__version__.startswith(RELEASES):
        return
    patch_language_for_good(patch)
    remember_types(patch)
    remember_broadcasts(patch)
    remember_operations(patch)
    unwrap_tiles_at_once(patch)
    check_no_overflow(patch)


def patch_language_for_good(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches triton.language at each call of a device function, and undoes it."""
    patch_language, semantic = interpreter._patch_lang, interpreter.interpreter_semantic

    class Scope(interpreter._LangPatchScope):
        def set_attr(self, obj: object, name: str, value: object) -> None:
            patch.setattr(obj, name, value, raising=False)

        def restore(self) -> None:
            pass

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Scope) -> None:
        function = getattr(member, "__wrapped__", member)  # without a check of what is passed

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, interpreted)

    @functools.cache
    def patched(*languages: Any) -> Scope:
        return patch_language(SimpleNamespace(__globals__=dict(enumerate(languages))))

    @functools.cache
    def once(fn: Any) -> Scope:
        return patched(*{x for x in fn.__globals__.values() if x is tl or x is tl.core})

    patch.setattr(interpreter, "_LangPatchScope", Scope)
    patch.setattr(interpreter, "_patch_attr", patch_builtin)
    patch.setattr(interpreter, "_patch_lang", once)


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


def remember_broadcasts(patch: pytest.MonkeyPatch) -> None:
    """The types of two tiles that were broadcast to each other follow from theirs."""
    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value
    pairs: dict[tuple[str, str], tuple[Any, Any]] = {}

    def broadcast_known(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        key = lhs.type.name, rhs.type.name
        if key not in pairs:
            operands = broadcast(lhs, rhs)
            pairs[key] = operands[0].type, operands[1].type
            return operands
        left, right = pairs[key]
        return to_type(lhs, left), to_type(rhs, right)

    def to_type(x: Any, type: Any) -> Any:
        if x.type.name == type.name:
            return x
        data = np.broadcast_to(x.handle.data, type.shape)
        return tl.tensor(interpreter.TensorHandle(data, type.scalar), type)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_known)


def remember_operations(patch: pytest.MonkeyPatch) -> None:
    """What an operation does follows from the types of its operands, and is learned once for each.

    It must be a cast, or cast two operands for one function of NumPy, which broadcasts by itself.
    """
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    notes: list[list[tuple[Any, ...]]] = []  # what each operation does that is being learned

    def noted(owner: Any, name: str, note: Any) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if notes:
                notes[-1].append(note(result, *args))
            return result

        patch.setattr(owner, name, call)

    def pointer_addition(result: Any, pointers: Any, offsets: Any) -> tuple[Any, ...]:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        return pointers, offsets, lambda at, n: at + width * n.astype(np.uint64)

    noted(semantic, "binary_op_type_checking_impl", lambda result, *args, **flags: result)
    noted(builder, "binary_op", lambda result, *args: args)
    noted(builder, "create_addptr", pointer_addition)
    noted(builder, "cast_impl", lambda result, *args: args)

    def kind_of(x: Any) -> str:
        return x.type.name if isinstance(x, tl.tensor) else repr(x)

    def remember(name: str, learn: Any) -> None:
        slow = getattr(semantic, name)
        known: dict[tuple, Any] = {}  # None: more than a function of the data

        def operate(x: Any, y: Any, *flags: Any) -> Any:
            key = kind_of(x), kind_of(y), *flags
            if key in known:
                function = known[key]
                return slow(x, y, *flags) if function is None else function(x, y)
            notes.append([])
            result = slow(x, y, *flags)
            known[key] = learn(result, x, y, *notes.pop())
            return result

        patch.setattr(semantic, name, operate)

    def as_operand(x: Any, ready: Any) -> Any:
        """Return how to get the data of an operand like ``x`` in the type of ``ready``."""
        if not isinstance(x, tl.tensor):
            data = ready.handle.data
            return lambda x: data
        if x.dtype.name == ready.dtype.name:
            return lambda x: x.handle.data
        return lambda x: semantic.cast(x, ready.dtype).handle.data

    def learn_operation(result: Any, x: Any, y: Any, *steps: tuple[Any, ...]) -> Any:
        if len(steps) != 2:
            return None
        operands, (*handles, function) = steps
        if [operand.handle for operand in operands] != handles:
            return None
        left, right = map(as_operand, (x, y), operands)
        dtype, type, np_dtype = result.handle.dtype, result.type, result.handle.data.dtype

        def operate(x: Any, y: Any) -> Any:
            data = function(left(x), right(y)).astype(np_dtype, copy=False)
            return tl.tensor(interpreter.TensorHandle(data, dtype), type)

        return operate

    def learn_cast(result: Any, x: Any, y: Any, *steps: tuple[Any, ...]) -> Any:
        if result is x:
            return lambda x, y: x
        if len(steps) != 1 or tl.bfloat16 in (x.dtype, result.dtype):
            return None
        dtype, type, np_dtype = result.handle.dtype, result.type, result.handle.data.dtype

        def cast(x: Any, y: Any) -> Any:
            return tl.tensor(interpreter.TensorHandle(x.handle.data.astype(np_dtype), dtype), type)

        return cast

    remember("cast", learn_cast)
    for name in OPERATIONS:
        remember(name, learn_operation)


def unwrap_tiles_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nearly everything that the interpreter tries to unwrap is a tile."""
    unwrap = tl.core._unwrap_if_constexpr

    def unwrap_others(x: Any) -> Any:
        return x if type(x) is tl.tensor else unwrap(x)

    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_others)


def check_no_overflow(patch: pytest.MonkeyPatch) -> None:
    """Integers that overflow are found for an assertion that is off: it needs ``debug``, too."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
