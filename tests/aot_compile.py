"""Compile every kernel for GPUs that are not here; prints one JSON object per kernel.

Run by test_compile.py in a process of its own, since triton is either interpreted or not, for
good, from its first import.
"""

import json
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget

from flce_dist.kernels import (
    dlogits,
    label_logit,
    linear_stats,
    merge_stats,
    rescue,
    tuning,
)
from flce_dist.kernels.filtered.tuning import GEMMS
from flce_dist.kernels.launching import TileLaunch
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import TileConfig
from flce_dist.parallel.vocab import INVARIANT_ROWS
from tests.aot_filter import compile_filter

T, H, V = 8192, 4096, 32000
NVIDIA_BIN = Path(triton.backends.nvidia.__file__).parent / "bin"
DTYPES = {2: torch.bfloat16, 4: torch.float32}
# Must not spill, being of the ordinary path; the rescue of overflowing rows and metrics may.
HOT = (
    "linear_stats", "linear_stats cached", "merge", "merge entropy", "dlogits", "dlogits scaled",
    "label_logit", "kept_dlogits", "add_kept_dhidden", "kept_dweight",
)  # fmt: skip


def all_configs() -> list[tuple[str, int, bool, TileConfig]]:
    """Every ``(arch, itemsize, stores, config)`` that a GPU may get."""
    configs = {
        (arch, itemsize, stores, tuning.tile_config(arch, itemsize, T, stores)): None
        for arch, itemsize in tuning.TILES
        if arch != tuning.INTERPRETED
        for T in (64, 128, 8192)
        for stores in (False, True)
    }
    return list(configs)


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


def compile_all(
    arch: str, itemsize: int, stores: bool, config: TileConfig, group_v: int | None
) -> dict[str, Any]:
    """Compile the kernels around a logits tile as their launchers would with this tile.

    With ``group_v`` those whose tiles sum groups of so many columns in one order, else all.
    """
    dtype = DTYPES[itemsize]
    # Few rows: descriptors and constexprs know none but the strides.
    logits = ShardLogits(
        hidden=torch.empty(256, H, dtype=dtype),
        weight=torch.empty(256, H, dtype=dtype),
        bias=None,
        labels=torch.empty(16, dtype=torch.int64),
        vocab_start_index=0,
        ignore_index=-100,
        logit_scale=1.0,
        softcap=None,
        group_v=group_v,
    )
    launch = TileLaunch(
        config, programs=132, tma=tuning.has_tma(arch), T=256, V=256,
        group_v=group_v or config.BLOCK_V,
    )  # fmt: skip
    out = launch.output(torch.empty(256, V, dtype=dtype))
    pointer = torch.empty(16, dtype=dtype)
    fp32, fp64 = torch.empty(16), torch.empty(16, dtype=torch.float64)
    int32 = torch.empty(16, dtype=torch.int32)
    labels = logits.labels
    operands = (*launch.operands(logits), labels)
    strides, scalars = logits.strides, logits.scalars
    common = {**launch.constexprs, "grid": (132,)}
    stats = linear_stats._linear_stats_kernel.jit.warmup
    plain = {"WITH_ENTROPY": False, "WITH_SUM_Z": False, "EVEN_V": False}
    group, headroom = {"GROUP_V": launch.group_v}, launch.headrooms
    if stores:
        cached = stats(
            *operands, fp32, fp32, out, T, V, H, V, strides, V, 0, scalars,
            **plain, **group, **common,
        )  # fmt: skip
        if group_v is not None:
            return {"linear_stats cached": cached}
        return {
            "linear_stats cached": cached,
            "dlogits": dlogits._dlogits_kernel.jit.warmup(
                *operands, fp32, None, None, None, out, T, V, H, strides, V, scalars,
                **common,
            ),
            "dlogits scaled": dlogits._dlogits_kernel.jit.warmup(
                *operands, fp32, fp32, None, None, out, T, V, H, strides, V, scalars,
                **common,
            ),
            "dlogits affine": dlogits._dlogits_kernel.jit.warmup(
                *operands, fp32, fp32, fp32, fp32, out, T, V, H, strides, V, scalars,
                **common,
            ),
        }  # fmt: skip
    pointers = replace(launch, tma=False)
    linear = {
        "linear_stats": stats(
            *operands, fp32, fp32, None, T, V, H, 0, strides, 0, 0, scalars,
            **plain, **group, **common,
        ),
    }  # fmt: skip
    if group_v is not None:
        return linear
    return linear | {
        "rescue": rescue._rescue_kernel.jit.warmup(
            *pointers.operands(logits), labels, fp32, fp32, int32, fp64, pointer, T, V, H, T,
            strides, V, 0, scalars, WITH_ENTROPY=False,
            **group, **headroom, **pointers.constexprs, grid=(132,),
        ),
        # One tile: the compiler takes a count of 1 for a constant.
        **{
            name: merge_stats._merge_kernel.jit.warmup(
                fp32, fp32, fp32, fp64, tiles, T, T, WITH_ENTROPY=entropy, WITH_SUM_Z=True,
                FIRST=False, GROUPS=config.BLOCK_V // launch.group_v, BLOCK_N=block_n, BLOCK_T=32,
                num_warps=4, **headroom, grid=(T // 32,),
            )
            for name, tiles, entropy, block_n in (
                ("merge", 132, False, 128),
                ("merge entropy", 132, True, 64),
                ("merge one tile", 1, True, 1),
            )
        },
        **{
            name: rescue._list_tokens_kernel.jit.warmup(
                fp32, fp32, fp64, int32, tokens, tokens,
                WITH_ENTROPY=True, WITH_SUM_Z=True, BLOCK_T=block_t, grid=(8,),
            )
            for name, tokens, block_t in (("list tokens", T, 1024), ("list one token", 1, 1))
        },
        "label_logit": label_logit._label_logit_kernel.jit.warmup(
            pointer, pointer, None, labels, fp32, T, V, H, strides, 0, scalars, V,
            BLOCK_H=1024, grid=(T,),
        ),
        "label_logit with bias": label_logit._label_logit_kernel.jit.warmup(
            pointer, pointer, pointer, labels, fp32, 1, 1, H, strides, 0, (*scalars[:2], 1.0), V,
            BLOCK_H=1024, grid=(1,),
        ),
    }  # fmt: skip


def spilled_bytes(cubin: bytes, ptx: str, capability: int) -> int:
    """What spills lies on the stack; only ptxas tells spills from the rest of it, and slowly."""
    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
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
    for layout in re.findall(r'"tt.reduce".*?tensor<\d+x\d+x\d+xf32, (#\w+)>', ttgir, re.S):
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


def report(arch: str, itemsize: int, block_t: int, group_v: int | None, **kernels: Any) -> None:
    """Print what the compiler made of each kernel."""
    capability = int(arch.removeprefix("sm_"))
    for name, kernel in kernels.items():
        ptx = kernel.asm["ptx"]
        facts = {
            "arch": arch,
            "itemsize": itemsize,
            "BLOCK_T": block_t,
            "kernel": name,
            "group_v": group_v,
            "shared": kernel.metadata.shared,
            "spilled": spilled_bytes(kernel.asm["cubin"], ptx, capability) if name in HOT else 0,
            "wgmma": "wgmma.mma_async" in ptx,
            "tma": "cp.async.bulk.tensor" in ptx,
            "tcgen05": "tcgen05.mma" in ptx,
            "orders": sorted(orders_of_a_group(kernel.asm["ttgir"])),
        }
        print(json.dumps(facts), flush=True)


def main() -> None:
    for arch, itemsize, stores, config in all_configs():
        triton.runtime.driver.set_active(AbsentGpu(int(arch.removeprefix("sm_"))))
        for group_v in (None, INVARIANT_ROWS):
            kernels = compile_all(arch, itemsize, stores, config, group_v)
            report(arch, itemsize, config.BLOCK_T, group_v, **kernels)
    for arch, itemsize in GEMMS:
        if arch != tuning.INTERPRETED:
            triton.runtime.driver.set_active(AbsentGpu(int(arch.removeprefix("sm_"))))
            kernels = compile_filter(arch, DTYPES[itemsize])
            report(arch, itemsize, tuning.TILES[arch, itemsize].BLOCK_T, None, **kernels)


if __name__ == "__main__":
    main()
