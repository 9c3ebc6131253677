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


def check_no_overflow(patch: pytest.MonkeyPatch) -> None:
    """Integers that overflow are found for an assertion that is off: it needs ``debug``, too."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
