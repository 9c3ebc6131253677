"""What the host launches: a kernel of Triton whose later launches cost a look-up.

At each launch Triton binds, specialises and hashes every argument, which takes the host longer than
a pass over [T] takes the GPU. Here a launch that differs from an earlier one only in what Triton
does not specialise on runs what that one compiled.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import triton
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

FOLLOW_T = ("T", "stride_sums", "blocks", "rounds", "step", "round")
"""Arguments that change with the number of tokens, on which no kernel is specialised: a T that is
no multiple of 16 compiles nothing anew."""

_MOST_KNOWN = 1024  # launches of one kernel that are remembered


class Kernel:
    """``kernel[grid](*args, **constexprs)`` launches ``fn`` as ``triton.jit(fn)`` does.

    Arguments are passed by position, constexprs and launch options by keyword.
    """

    def __init__(self, fn: Callable[..., None], **options: Any) -> None:
        self.jit: Any = triton.jit(fn, do_not_specialize=FOLLOW_T, **options)
        params = getattr(self.jit, "params", ())  # an interpreted function has none
        self._names = [param.name for param in params]
        arguments = [param.name for param in params if not param.is_constexpr]
        specialized = [i for i, name in enumerate(arguments) if name not in FOLLOW_T]
        self._specialized: Callable[[Any], tuple[Any, ...]] = itemgetter(*specialized or (0, 0))
        self._known: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if triton.knobs.runtime.interpret:
            return self.jit[grid]

        def launch(*args: Any, **constexprs: Any) -> None:
            active = driver.active
            device = active.get_current_device()
            key = (device, *constexprs, *constexprs.values(), *map(_fact, self._specialized(args)))
            known = self._known.get(key)
            hooks = triton.knobs.runtime.launch_enter_hook  # of Triton's profiler
            if known is None or getattr(hooks, "calls", hooks):
                compiled = self.jit[grid](*args, **constexprs)
                if len(self._known) == _MOST_KNOWN:
                    self._known.clear()
                if compiled is not None:  # else a hook of Triton's has only looked at it
                    rest = tuple(constexprs[name] for name in self._names[len(args) :])
                    self._known[key] = compiled, rest
                return
            compiled, rest = known
            x, y = grid if len(grid) == 2 else (*grid, 1)
            compiled.run(
                x, y, 1, active.get_current_stream(device), compiled.function,
                compiled.packed_metadata, None, None, None, *args, *rest,
            )  # fmt: skip

        return launch


def _fact(x: Any) -> Any:
    """Return what a compiled kernel may depend on in one argument; of a number, its value."""
    kind = x.__class__
    if kind is int or kind is float:
        return kind, x
    if kind is TensorDescriptor:
        return x.base.dtype, *x.block_shape
    return None if x is None else (x.dtype, x.data_ptr() % 16)
