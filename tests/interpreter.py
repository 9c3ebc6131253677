"""Triton's interpreter with NumPy of today and without work that it repeats: 15 times as fast.

It is Python, and tiles of tests are small: nearly all of its time goes into types and shapes.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton import language as tl
from triton.runtime import interpreter

from tests.recorder import Recorder

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
    check_no_overflow(patch)


def patch_language_for_good(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches triton.language at each call of a device function, and undoes it."""
    patch_language = interpreter._patch_lang

    class Scope(interpreter._LangPatchScope):
        def set_attr(self, obj: object, name: str, value: Any) -> None:
            if name == "__bool__":
                value = true_while_recorded(value)
            patch.setattr(obj, name, value, raising=False)

        def restore(self) -> None:
            pass

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Scope) -> None:
        scope.set_attr(obj, name, remembered(getattr(member, "__wrapped__", member)))

    @functools.cache
    def patched(*languages: Any) -> Scope:
        return patch_language(SimpleNamespace(__globals__=dict(enumerate(languages))))

    @functools.cache
    def once(fn: Any) -> Scope:
        return patched(*{x for x in fn.__globals__.values() if x is tl or x is tl.core})

    patch.setattr(interpreter, "_LangPatchScope", Scope)
    patch.setattr(interpreter, "_patch_attr", patch_builtin)
    patch.setattr(interpreter, "_patch_lang", once)


def remembered(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``builtin``, which for arguments of the same types calls the same of the builder."""
    semantic = interpreter.interpreter_semantic
    programs = dict[Any, Any]()

    def interpreted(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if semantic.builder.__class__ is Recorder:
            return builtin(*args, **kwargs, _semantic=semantic)
        handles: list[Any] = []
        facts: list[Any] = []
        for x in args:
            if x.__class__ is tl.tensor:  # as ``kind`` does
                handles.append(x.handle)
                facts.append(x.type.name)
            else:
                facts.append(kind(x, handles))
        key = tuple(facts)
        if kwargs:
            key += tuple([(name, kind(x, handles)) for name, x in kwargs.items()])
        if program := programs.get(key):
            return program(*handles)
        if key in programs or len({id(x) for x in handles}) < len(handles):
            return builtin(*args, **kwargs, _semantic=semantic)
        noted = Recorder(semantic.builder, handles)
        semantic.builder = noted
        try:
            result = builtin(*args, **kwargs, _semantic=semantic)
        finally:
            semantic.builder = noted.builder
        programs[key] = noted.program(result)
        return result

    return interpreted


def kind(x: Any, handles: list[Any]) -> Any:
    """Return all of ``x`` that a builtin looks at, and append its handles, which hold data."""
    cls = x.__class__
    if cls is tl.tensor:
        handles.append(x.handle)
        return x.type.name
    if cls is tl.constexpr:
        return cls, x.value.__class__, x.value
    if cls is tuple or cls is list or cls is tl.tuple:
        return cls, *[kind(each, handles) for each in x]
    if cls is slice:
        return cls, x.start, x.stop, x.step
    if cls is tl.tensor_descriptor:
        handles.append(x.handle)
        return cls, x.block_type.name
    return cls, x


def true_while_recorded(truth: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A builtin asks for no tensor's truth but whether it is None, which compilers take for it."""
    semantic = interpreter.interpreter_semantic
    return lambda x: semantic.builder.__class__ is Recorder or truth(x)


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """Types are alike if their names are; data have the size of their type."""
    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def known_np_dtype(type: Any) -> Any:
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype(type)
        return np_dtypes[type.name]

    patch.setattr(interpreter, "_get_np_dtype", known_np_dtype)
    patch.setattr(interpreter.TensorHandle, "__post_init__", lambda self: None)


def check_no_overflow(patch: pytest.MonkeyPatch) -> None:
    """Integers that overflow are found for an assertion that is off: it needs ``debug``, too."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
