"""Time linear_cross_entropy beside its floors and its peers, with errors and memory.

    python -m flce_dist.launch.bench --config configs/bench/one_gpu.yaml
    torchrun --nproc-per-node 2 -m flce_dist.launch.bench --config configs/bench/smoke.yaml

At each shape every run is called, compared with fp64 and measured for memory. Then all are timed in
turns in this process, so that a warm GPU or a busy host affects all alike. The order is shuffled in
each round, since a run that draws little power leaves a cool GPU to the next. Result files are
replaced after each shape; a benchmark that was interrupted continues after the last complete shape.
"""

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import os
import random
import shlex
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flce_dist.launch.about import about, version_of
from flce_dist.launch.bench.config import (
    BenchConfig,
    ShapeSpec,
    all_shapes,
    as_json,
    check_shape,
    load_config,
    runs_of,
)
from flce_dist.launch.bench.files import (
    records_so_far,
    trace_file,
    with_suffix,
    write_profiles,
    write_results,
)
from flce_dist.launch.bench.measure import Measured, free_memory, over_ranks
from flce_dist.launch.bench.peers import PEERS, close_peers, forget_compiled
from flce_dist.launch.bench.problem import TrainedHead, Truth, make_problem, make_truth
from flce_dist.launch.bench.profiles import Profile, describe
from flce_dist.launch.bench.report import Record, make_records, table
from flce_dist.launch.process_group import start
from flce_dist.launch.write import check_writable
from flce_dist.launch.yaml_config import ConfigError

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_", "TORCH_SYMM_MEM_")
"""How variables begin that decide how collectives run, and beside what."""


def main(args: list[str] | None = None) -> int:
    """Return 0 if the benchmark ran to its end, whatever single runs did."""
    rank = int(os.environ.get("RANK", "0"))
    config = load_config(
        sys.argv[1:] if args is None else args,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        show_errors=rank == 0,
    )
    device_type = _device_type(config)
    if rank == 0:
        check_writable(with_suffix(config.out, ".json"))
    head = None
    if config.head is not None:
        head = TrainedHead.load(config.head, config.widen)
        check_shape(head.shape, runs_of(config, head.shape), int(os.environ.get("WORLD_SIZE", "1")))
    device, tp_group = start(device_type)
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 170)
    try:
        _bench(config, head, device, tp_group, console)
    finally:
        close_peers(tp_group)
    return 0


def _device_type(config: BenchConfig) -> str:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda needs a GPU, found none")
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _bench(
    config: BenchConfig,
    head: TrainedHead | None,
    device: torch.device,
    tp_group: dist.ProcessGroup | None,
    console: Console,
) -> None:
    P = 1 if tp_group is None else tp_group.size()
    packages = {peer.package for peer in PEERS.values() if peer.package is not None}
    facts = {
        "command": shlex.join(["python", "-m", "flce_dist.launch.bench", *sys.argv[1:]]),
        "ranks": P,
        **about(device),
        "environment": {x: os.environ[x] for x in sorted(os.environ) if x.startswith(VARIABLES)},
        "peers": {package: version_of(package) for package in sorted(packages)},
        "config": as_json(config),
    }
    records = [] if config.fresh else _records_so_far(config, facts, tp_group)
    done = {record.shape for record in records}
    shapes = all_shapes(config) if head is None else [head.shape]
    for number, shape in enumerate(shapes, start=1):
        if (shape.T, shape.H, shape.V, shape.dtype) in done:
            console.print(f"{shape.name}: measured before")
            continue
        started = time.monotonic()
        found, profiles = _bench_shape(config, shape, head, device, tp_group, console)
        records += found
        if not console.quiet:  # rank 0
            write_results(config.out, facts, records)
            if profiles:
                size = {"T": shape.T, "H": shape.H, "V": shape.V, "dtype": shape.dtype}
                write_profiles(config.out, facts, size, profiles)
        console.print(table(found))
        for name, profile in profiles.items():
            text = describe(profile)
            if text:
                console.print(f"{name}: {text}", highlight=False, markup=False)
        seconds = time.monotonic() - started
        console.print(f"shape {number} of {len(shapes)}, {seconds:.1f} s", highlight=False)
    console.print(f"records in {with_suffix(config.out, '.json')} and .csv", highlight=False)


def _bench_shape(
    config: BenchConfig,
    shape: ShapeSpec,
    head: TrainedHead | None,
    device: torch.device,
    tp_group: dist.ProcessGroup | None,
    console: Console,
) -> tuple[list[Record], dict[str, Profile]]:
    """Measure every run at one shape and, if asked for, profile it; collective."""
    if head is None:
        problem = make_problem(shape, device, config.seed, tp_group)
    else:
        problem = head.problem(device, tp_group)
    found = [Measured(run, problem, config) for run in runs_of(config, shape)]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,  # seldom: drawing shares the interpreter with the launches timed
    ) as progress:
        bar = progress.add_task(f"{shape.name}: fp64", total=len(found) * (1 + config.rounds))
        truth: Truth | None = None
        if config.check != "none":
            backward = any(x.run.has_gradients for x in found)
            truth = make_truth(problem, gradients=backward and config.check == "gradients")
        for measured in found:
            progress.update(bar, description=f"{shape.name}: preparing {measured.run.name}")
            measured.prepare(truth)
            over_ranks(measured)
            progress.advance(bar)
        del truth
        free_memory(device)
        order = random.Random(config.seed)  # the same on all ranks
        for _ in range(config.rounds):
            for measured in order.sample(found, len(found)):
                progress.update(bar, description=f"{shape.name}: timing {measured.run.name}")
                measured.sample()
                progress.advance(bar)
    records = make_records(shape, found)
    profiles = {}
    for measured in found:
        if config.profile or config.trace:
            file = trace_file(config.out, shape.name, measured.run.name)
            profile = measured.profile(file if config.trace else None)
            if profile is not None:
                profiles[measured.run.name] = profile
        measured.release()
    del found, measured, problem
    forget_compiled()
    free_memory(device)
    return records, profiles


def _records_so_far(
    config: BenchConfig, facts: dict[str, Any], tp_group: dist.ProcessGroup | None
) -> list[Record]:
    """Read what rank 0 finds: it alone writes, and other hosts may not see its files."""
    found: list[Any] = [None]
    if tp_group is None or tp_group.rank() == 0:
        try:
            found = [records_so_far(config.out, facts)]
        except ConfigError as error:
            found = [error]
    if tp_group is not None:
        dist.broadcast_object_list(found, src=0, group=tp_group)
    if isinstance(found[0], ConfigError):
        raise found[0]
    return found[0]


if __name__ == "__main__":
    run_program(main)
