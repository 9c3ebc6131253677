"""Triton's kernels, and how one that was launched before is launched again.

At each launch Triton binds, specialises and hashes every argument, which takes the host longer than
a pass over [T] takes the GPU. A line in a program of ``replay.py`` runs what Triton compiled for
the arguments that were recorded: they then differ in addresses alone, which are as aligned.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.replay import Source, issued, recorder

FOLLOW_T = ("T", "T_all", "entries", "stride_sums", "blocks", "rounds", "step", "round")
"""Arguments that change with the number of tokens, on which no kernel is specialised: a T that is
no multiple of 16 compiles nothing anew."""


class Tiled(NamedTuple):
    """A matrix that a kernel takes tile by tile: a ``TensorDescriptor`` of checked arguments."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Kernel:
    """``kernel[grid](*args, **constexprs)`` launches ``fn`` as ``triton.jit(fn)`` does.

    Arguments are passed by position, constexprs and launch options by keyword.
    """

    def __init__(self, fn: Callable[..., None], **options: Any) -> None:
        self.jit: Any = triton.jit(fn, do_not_specialize=FOLLOW_T, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constexprs: Any) -> None:
        launch = partial(_as_triton, partial(self.jit[grid], **constexprs))
        noted, compiled = recorder(), None
        if noted is not None and hasattr(self.jit, "params"):  # else it is interpreted
            compiled = _as_triton(partial(self.jit.warmup, grid=grid, **constexprs), *args)
        if noted is None or compiled is None:  # or a hook of Triton's keeps it from compiling
            issued(launch, *args)
            return
        device = driver.active.get_current_device()
        lead = (
            *grid, *(1,) * (3 - len(grid)), noted.once(driver.active.get_current_stream, device),
            compiled.function, compiled.packed_metadata, None, None, None,
        )  # fmt: skip
        given = (noted.address(x) if isinstance(x, Tensor) else x for x in args)
        rest = (constexprs[param.name] for param in self.jit.params[len(args) :])
        call, again = _passed_on(compiled.run, *lead, *given, *rest)
        noted.issued(noted.constant(call), launch, args, again)


def _passed_on(launcher: Any, *args: Any) -> tuple[Callable[..., None], Sequence[Any]]:
    """Return the function that a launcher of Triton's calls, and the arguments that it passes.

    Or the launcher and its own, if at each launch it allocates memory, which our kernels do not
    need, works for a sanitizer, or changes tensors.
    """
    each_time = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if any(getattr(launcher, name, 0) for name in each_time) or not hasattr(launcher, "launch"):
        return launcher, args
    passed: list[Any] = []
    noting = copy(launcher)
    noting.launch = lambda *given: passed.extend(given)
    noting(*args)
    arrived = {id(x) for x in passed} | {id(x) for y in passed if type(y) is tuple for x in y}
    if not all(id(x) in arrived for x in args if isinstance(x, Source | Tiled)):
        return launcher, args
    return launcher.launch, passed


def _as_triton(launch: Callable[..., Any], *args: Any) -> Any:
    return launch(*[TensorDescriptor(*x[:4]) if x.__class__ is Tiled else x for x in args])


def may_replay() -> bool:
    """Whether a program may issue a call again: not if Triton's profiler is told of launches."""
    hooks = triton.knobs.runtime.launch_enter_hook
    return not getattr(hooks, "calls", hooks)
