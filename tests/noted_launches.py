"""Launch a kernel in many ways, by ``Kernel`` and by ``triton.jit``; print where they differ.

Run by test_kernel.py, in a process in which triton compiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.kernels.kernel import Kernel, Tiled
from tests.aot_compile import AbsentGpu

Launch = tuple[Any, ...]
noted: list[Launch] = []


class Launcher:
    """Notes what would be launched: source and arguments."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata

    def __call__(self, *args: Any) -> None:
        noted.append((self.name, *args[:5], *args[9:]))


class Utils:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> Launch:
        return None, hash(binary), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class NotingGpu(AbsentGpu):
    launcher_cls, utils = Launcher, Utils()


def add(x, y_ptr, out_ptr, T, n, scale, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if HAS_Y:
        z = tl.load(y_ptr + offs * n, mask=offs < T, other=0.0)
    else:
        z = offs.to(tl.float32)
    tl.store(out_ptr + offs, z * scale + x.load([0, 0]).sum(), mask=offs < T)


def changes() -> dict[str, Launch]:
    """Arguments of a launch and, by name, the same with one of them changed."""
    x, y = torch.empty(64, 64), torch.empty(64)

    def args(
        x: Any = x, block: int = 16, y: Any = y, out: Any = y, T: Any = 64, n: Any = 48,
        scale: Any = 2.0, device: int = 90, grid: tuple[int, ...] = (4,), **constexprs: Any,
    ) -> Launch:  # fmt: skip
        described = Tiled(x, list(x.shape), list(x.stride()), [block, block])
        constexprs = {"HAS_Y": y is not None, "BLOCK": 32, **constexprs}
        return device, grid, (described, y, out, T, n, scale), constexprs

    return {
        "nothing": args(),
        "values": args(x=torch.ones(64, 64), y=torch.ones(64)),
        "shape and stride of a descriptor": args(x=torch.empty(32, 128)),
        "block of a descriptor": args(block=32),
        "dtype of a descriptor": args(x=torch.empty(64, 64, dtype=torch.bfloat16)),
        "dtype": args(y=torch.empty(64, dtype=torch.bfloat16)),
        "alignment": args(y=torch.empty(65)[1:]),
        "absent tensor": args(y=None),
        "T": args(T=63),
        "T is 1": args(T=1),
        "divisor of a number": args(n=47),
        "a number is 1": args(n=1),
        "a number of 64 bits": args(n=2**40),
        "a float": args(scale=3.0),
        "constexpr": args(BLOCK=64),
        "launch option": args(num_warps=8),
        "grid": args(grid=(2, 3)),
        "device": args(device=80),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, TensorDescriptor) and isinstance(b, Tiled):
        return all(same(getattr(a, name, x), x) for name, x in b._asdict().items())
    return a is b or (not isinstance(a, torch.Tensor) and a == b)


def main() -> None:
    plain, ours = triton.jit(add, do_not_specialize=["T"]), Kernel(add)
    for name, (device, grid, args, constexprs) in [*changes().items(), *changes().items()]:
        triton.runtime.driver.set_active(NotingGpu(device))
        noted.clear()
        plain[grid](TensorDescriptor(*args[0][:4]), *args[1:], **constexprs)
        ours[grid](*args, **constexprs)
        expected, got = noted
        if not all(map(same, expected, got)) or len(expected) != len(got):
            print(f"{name}: other kernel or arguments")


if __name__ == "__main__":
    main()
