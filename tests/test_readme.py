"""The README's examples run, at a size that a CPU takes in a moment."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flce_dist.testing import RankPool

README = (Path(__file__).parent.parent / "README.md").read_text()
GPU_TO_CPU = {
    "8192, 4096, 128256": "64, 32, 1000",
    '"cuda"': '"cpu"',
    'torch.device("cpu", rank)': '"cpu"',
    "torch.cuda.set_device(rank)\n": "",
    "dist.init_process_group()": "None",  # simulated ranks have one already
}


def example(heading: str) -> dict[str, Any]:
    """Run the first Python block under ``## heading`` on a CPU; return its variables."""
    match = re.search(rf"^## {heading}\n.*?```python\n(.*?)```", README, re.M | re.S)
    assert match, f"README.md has no Python under '## {heading}'"
    source = match[1]
    for gpu, cpu in GPU_TO_CPU.items():
        source = source.replace(gpu, cpu)
    names: dict[str, Any] = {}
    exec(compile(source, f"README.md, {heading}", "exec"), names)
    return names


def test_one_gpu() -> None:
    names = example("On one GPU")
    assert names["loss"].dtype == torch.float32 and names["loss"].shape == ()
    assert names["hidden"].grad.shape == (64, 32) and names["hidden"].grad.abs().sum() > 0
    assert names["weight"].grad.shape == (1000, 32) and names["weight"].grad.abs().sum() > 0


def tensor_parallel(tp_group: dist.ProcessGroup) -> tuple[float, tuple[int, ...]]:
    torch.manual_seed(tp_group.rank())
    names = example("Under tensor and sequence parallelism")
    return names["loss"].item(), tuple(names["hidden"].grad.shape)


def test_tensor_parallel(pools: dict[int, RankPool]) -> None:
    first, second = pools[2].run(tensor_parallel)
    assert first == second
    assert first[1] == (32, 32)
