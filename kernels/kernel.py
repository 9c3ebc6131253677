"""What the host launches: a kernel of Triton whose later launches cost a look-up.

At each launch Triton binds, specialises and hashes every argument, which takes the host longer than
a pass over [T] takes the GPU. Here a launch that differs from an earlier one only in what Triton
does not specialise on runs what that one compiled.
"""

import functools
import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.replay import issued

FOLLOW_T = ("T", "T_all", "stride_sums", "blocks", "rounds", "step", "round")
"""Arguments that change with the number of tokens, on which no kernel is specialised: a T that is
no multiple of 16 compiles nothing anew."""

_compiling = threading.Lock()  # a thread could run what another has begun to load
_MOST_KNOWN = 1024  # launches of one kernel that are remembered


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
        # An interpreted function has no parameters, and is not looked up.
        self._names = [param.name for param in getattr(self.jit, "params", ())]
        self._picks: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
        self._known: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constexprs: Any) -> None:
        if not self._names:
            issued(functools.partial(self._as_triton, self.jit[grid], constexprs), *args)
            return
        device = driver.active.get_current_device()
        tensors, numbers = self._picks or self._pick(args)
        key = (
            device, *constexprs, *constexprs.values(), *numbers(args), *map(_fact, tensors(args))
        )  # fmt: skip
        known = self._known.get(key)
        if known is None:
            warmup = functools.partial(self.jit.warmup, grid=grid)
            with _compiling:
                compiled = self._as_triton(warmup, constexprs, *args)
                if compiled is None:  # a hook of Triton's has looked at it
                    return
                assert compiled.run is not None  # loads it
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            rest = tuple(constexprs[name] for name in self._names[len(args) :])
            known = self._known[key] = compiled, rest
        issued(functools.partial(self._run, *known, device, grid, constexprs), *args)

    def _run(
        self, compiled: Any, rest: tuple[Any, ...], device: int, grid: tuple[int, ...],
        constexprs: dict[str, Any], *args: Any,
    ) -> None:  # fmt: skip
        hooks = triton.knobs.runtime.launch_enter_hook  # of Triton's profiler
        if getattr(hooks, "calls", hooks):
            self._as_triton(self.jit[grid], constexprs, *args)
            return
        x, y = grid if len(grid) == 2 else (*grid, 1)
        compiled.run(
            x, y, 1, driver.active.get_current_stream(device), compiled.function,
            compiled.packed_metadata, None, None, None, *args, *rest,
        )  # fmt: skip

    @staticmethod
    def _as_triton(launch: Callable[..., Any], constexprs: dict[str, Any], *args: Any) -> Any:
        described = [TensorDescriptor(*x[:4]) if x.__class__ is Tiled else x for x in args]
        return launch(*described, **constexprs)

    def _pick(self, args: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return how to pick the tensors and the numbers on which a kernel may be specialised.

        A number of the wrong type is refused by the compiled launch.
        """
        tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor | Tiled | None)]
        numbers = [i for i in range(len(args)) if i not in tensors]
        numbers = [i for i in numbers if self._names[i] not in FOLLOW_T]
        self._picks = _picker(tensors), _picker(numbers)
        return self._picks


def _picker(places: list[int]) -> Callable[[Any], Any]:
    return itemgetter(*places, *places[:1]) if places else lambda args: ()  # one alone is no tuple


def _fact(x: Any) -> Any:
    """Return what a compiled kernel may depend on in a tensor, a descriptor or None."""
    if x is None:
        return None
    if x.__class__ is Tiled:
        return x.base.dtype, *x.block_shape
    return x.dtype, x.data_ptr() % 16
