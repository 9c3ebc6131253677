"""Triton's kernels, and how one that was launched before is launched again.

At each launch Triton binds, specialises and hashes every argument, which takes the host longer than
a pass over [T] takes the GPU. A launch in a program of ``replay.py`` runs what Triton compiled for
the arguments that were recorded: they then differ in addresses alone, which are as aligned.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.replay import issued, recorder

FOLLOW_T = ("T", "T_all", "stride_sums", "blocks", "rounds", "step", "round")
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
        if recorder() is not None and hasattr(self.jit, "params"):  # else it is interpreted
            names = [param.name for param in self.jit.params]
            compiled = _as_triton(partial(self.jit.warmup, grid=grid, **constexprs), *args)
            if compiled is not None:  # else a hook of Triton's keeps it from compiling
                device = driver.active.get_current_device()
                rest = tuple(constexprs[name] for name in names[len(args) :])
                launch = partial(_again, compiled, launch, device, grid, rest)
        issued(launch, *args)


def _as_triton(launch: Callable[..., Any], *args: Any) -> Any:
    return launch(*[TensorDescriptor(*x[:4]) if x.__class__ is Tiled else x for x in args])


def _again(
    compiled: Any, launch: Callable[..., None], device: int, grid: tuple[int, ...],
    rest: tuple[Any, ...], *args: Any,
) -> None:  # fmt: skip
    hooks = triton.knobs.runtime.launch_enter_hook  # of Triton's profiler
    if getattr(hooks, "calls", hooks):
        launch(*args)
        return
    x, y = grid if len(grid) == 2 else (*grid, 1)
    compiled.run(
        x, y, 1, driver.active.get_current_stream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *args, *rest,
    )  # fmt: skip
