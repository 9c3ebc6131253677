"""Compile the kernels of tiles for GPUs that are not here; prints one JSON object per kernel.

Run by test_compile.py in processes of its own, since triton is either interpreted or not, for
good, from its first import. A process for each core takes one chip and dtype at a time.
"""

import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from flce_dist.kernels import tuning
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.parallel.vocab import INVARIANT_ROWS
from tests.aot_calls import SHAPES, H, calls_of

NVIDIA_BIN = Path(triton.backends.nvidia.__file__).parent / "bin"
DTYPES = {2: torch.bfloat16, 4: torch.float32}
# Must not spill, being of the ordinary path; the rescue of overflowing rows and metrics may.
HOT = (
    "linear_stats", "linear_stats cached", "merge", "merge entropy", "dlogits", "dlogits scaled",
    "linear_stats tempered", "dlogits tempered", "logits_at_ids", "kept_dlogits",
    "add_kept_dhidden", "kept_dweight", "counted_gemm counted", "linear_stats counted",
    "dlogits counted", "linear_stats named", "best_pass one", "best_pass rank", "best_pass many",
    "best_pass most", "best_pass sample", "label_tiles", "pair_logits divergence",
    "pair_sums divergence", "pair_dlogits divergence",
)  # fmt: skip


class AbsentGpu:
    """What triton asks of a driver while it compiles. One device number per chip: it caches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def spilled_bytes(cubin: bytes, ptx: str, capability: int) -> int:
    """What spills lies on the stack; only ptxas tells spills from the rest of it, and slowly."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        text = Path(folder, "kernel.ptx")
        binary.write_bytes(cubin)
        used = _output(NVIDIA_BIN / "cuobjdump", "--dump-resource-usage", binary).stdout
        if re.findall(r"STACK:(\d+)", used) == ["0"]:
            return 0
        text.write_text(ptx)
        assembler = NVIDIA_BIN / ("ptxas-blackwell" if capability >= 100 else "ptxas")
        name = f"sm_{capability}" + ("a" if capability >= 90 else "")
        log = _output(assembler, "-v", "--gpu-name", name, text, "-o", os.devnull).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))


def _output(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)


def orders_of_a_group(ttgir: str) -> set[str]:
    """Which columns of a group are added inside a thread, a warp and a block, in which order."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", ttgir, re.M))
    orders = set()
    reduced = re.findall(r'"tt.reduce"(.*?)tensor<\d+x\d+x\d+xf32, (#\w+)>', ttgir, re.S)
    for region, layout in reduced:
        if "arith.addf" not in region:  # a maximum does not depend on the order
            continue
        text = layouts[layout]
        linear = [
            [int(basis[2]) for basis in json.loads(bases) if basis[2]]
            for bases in re.findall(r"(?:register|lane|warp) = (\[\[.*?\]\]|\[\])", text)
        ]
        blocked = re.findall(
            r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[\d+, \d+, (\d+)", text
        )
        orders.add(str(linear or blocked))
    return orders


def report(kernel: Any, name: str, arch: str, **facts: Any) -> None:
    """Print what the compiler made of a kernel."""
    ptx = kernel.asm["ptx"]
    capability = int(arch.removeprefix("sm_"))
    facts |= {
        "kernel": name,
        "arch": arch,
        "shared": kernel.metadata.shared,
        "spilled": spilled_bytes(kernel.asm["cubin"], ptx, capability) if name in HOT else 0,
        "vectors": "ld.global.v4.b32" in ptx,
        "wgmma": "wgmma.mma_async" in ptx,
        "tma": "cp.async.bulk.tensor" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
        "orders": sorted(orders_of_a_group(kernel.asm["ttgir"])),
    }
    print(json.dumps(facts) + "\n", end="", flush=True)  # at once: other processes print, too


def compile_for(arch: str, itemsize: int) -> None:
    """Call every launcher with CPU tensors, and compile where it would launch."""
    triton.runtime.driver.set_active(AbsentGpu(int(arch.removeprefix("sm_"))))
    dtype = DTYPES[itemsize]
    seen = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            name = self.__name__.removeprefix("_").removesuffix("_kernel") + variant
            report(kernel, name, arch, itemsize=itemsize, T=T, group_v=group_v)

    with (
        mock.patch.object(tuning, "device_arch", lambda device: (arch, 132)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        # The order of a group is compared between the extremes. In fp32 tiles are those of sm_80.
        plain = SHAPES[:-1] if itemsize == 2 or arch in ("sm_80", "sm_90") else ()
        of_groups = [(shape, INVARIANT_ROWS) for shape in (SHAPES[0], SHAPES[-1])]
        for (T, V), group_v in [*((shape, None) for shape in plain), *of_groups]:
            hidden, weight = (torch.empty(n, H, dtype=dtype) for n in (T, V))
            labels = torch.zeros(T, dtype=torch.int64)
            logits = ShardLogits(hidden, weight, None, labels, 0, -100, 1.0, None, group_v)
            for variant, call in calls_of(logits):  # noqa: B007  # read by compile_only
                call()


def main() -> None:
    targets = [target for target in tuning.TILES if target[0] != tuning.INTERPRETED]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(compile_for, *zip(*targets, strict=True)):
            pass
