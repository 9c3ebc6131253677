"""Launch a kernel by a program and by ``triton.jit``; print where the launches differ.

Run by test_compile.py, in a process in which triton compiles.
"""

import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver as cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.kernels.kernel import Kernel, Tiled
from flce_dist.replay import replayed
from tests.aot_compile import AbsentGpu

# Triton 3.6 passes a kernel's arguments behind this many others, later ones in one tuple.
FIRST = getattr(cuda, "_BASE_ARGS_FORMAT_LEN", 0)
IN_ONE = not FIRST

noted: list[tuple[Any, ...]] = []
memories: list[Any] = []


class Launcher:
    """Notes what would be launched: source and arguments.

    As Triton's it calls a function with more arguments, some with memory of the call, some with
    addresses for descriptors, some Triton's own that makes descriptors.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name, self.launch = metadata, self.note
        kind = zlib.crc32(repr(metadata).encode()) % 4
        self.global_scratch_size, self.has_addresses = int(kind == 1), kind == 2
        if kind == 3:
            of_tiled = getattr(metadata, "tensordesc_meta", None)
            self.launch = cuda.wrap_handle_tensordesc(self.note, src.signature, of_tiled)

    def __call__(self, *args: Any) -> None:
        memories.append([object()] * self.global_scratch_size)
        rest = args[9:]
        if self.has_addresses:
            rest = tuple(x.base.data_ptr() if hasattr(x, "base") else x for x in rest)
        base = *args[:5], memories[-1], args[5:9]
        if IN_ONE:
            self.launch(*base, rest)
        else:
            self.launch(*base, *(None,) * (FIRST - len(base)), *rest)

    def note(self, *args: Any) -> None:
        if args[5] and args[5] != memories[-1]:
            print("memory of an earlier launch")
        noted.append((self.name, *args[:5], *(args[-1] if IN_ONE else args[FIRST:])))


def descriptor(address: int, *facts: Any) -> tuple[Any, ...]:
    return address, *facts[:4], *map(tuple, facts[4:6])


class NotingGpu(AbsentGpu):
    launcher_cls = Launcher
    utils = SimpleNamespace(
        fill_tma_descriptor=descriptor,
        fill_tma_descriptor_tiled=descriptor,
        load_binary=lambda name, binary, shared, device: (None, hash(binary), 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )


def add(x, y_ptr, out_ptr, T, n, scale, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if HAS_Y:
        z = tl.load(y_ptr + offs * n, mask=offs < T, other=0.0)
    else:
        z = offs.to(tl.float32)
    tl.store(out_ptr + offs, z * scale[0] + x.load([0, 0]).sum(), mask=offs < T)


def main() -> None:
    plain, ours = triton.jit(add, do_not_specialize=["T"]), Kernel(add)

    def launch(x: Any, y: Any, out: Any, *numbers: Any, **constexprs: Any) -> None:
        tiled = Tiled(x, list(x.shape), list(x.stride()), [16, 16])
        ours[(4, 3)](tiled, y, out, *numbers, HAS_Y=y is not None, **constexprs)

    x, y = torch.empty(64, 64), torch.empty(65)
    cases = [
        (device, (x, other, y[:64]), numbers, {"BLOCK": block, "num_warps": 4})
        for device in (80, 90)
        for block in (32, 64)
        for other in (y[:64], y[1:], y.bfloat16(), None)
        for numbers in ((64, 48, (2.0, None)), (63, 1, (3.0, None)), (1, 2**40, (2.0, 5)))
    ]
    programs: list[dict[Any, Any]] = [{} for _ in cases]
    for repeat in range(3):
        x = torch.empty(64, 64)
        for of_case, (device, (_, *rest), numbers, constexprs) in zip(programs, cases, strict=True):
            inputs = (x, *rest)
            triton.runtime.driver.set_active(NotingGpu(device))
            noted.clear()
            facts = device, *numbers, *constexprs.values()
            replayed(of_case, facts, inputs, partial(launch, *inputs, *numbers, **constexprs))
            described = TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 16])
            has_y = inputs[1] is not None
            plain[(4, 3)](described, *inputs[1:], *numbers, HAS_Y=has_y, **constexprs)
            got, expected = noted
            if len(got) != len(expected) or not all(map(same, expected, got)):
                print(f"other kernel or arguments: {repeat}, {facts}, {inputs[1]}")
    if not all(callable(program) for of_case in programs for program in of_case.values()):
        print("not recorded")
    print(f"compared {len(cases)} launches")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, TensorDescriptor):
        return all(same(getattr(a, name), getattr(b, name)) for name in Tiled._fields[:4])
    if isinstance(a, Tensor) and isinstance(b, int):
        return a.data_ptr() == b
    return a is b or (not isinstance(a, Tensor) and a == b)
