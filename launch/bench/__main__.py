"""Time linear_cross_entropy beside its floors and its peers, with errors and memory.

    python -m flce_dist.launch.bench --config configs/bench/one_gpu.yaml
    torchrun --nproc-per-node 2 -m flce_dist.launch.bench --config configs/bench/smoke.yaml

At each shape every run is called, compared with fp64 and measured for memory. Then all are timed in
turns in this process, so that a warm GPU or a busy host affects all alike. The order is shuffled in
each round, since a run that draws little power leaves a cool GPU to the next. Result files are
replaced after each shape; a benchmark that was interrupted continues after the last complete shape.

The exit status is 1 if a run of ours or a floor is wrong or failed at any shape. What a peer does
is a result: its row says so.
"""

from flce_dist.launch.program import launcher_number, run_program  # isort: skip  # before other packages

import dataclasses
import os
import random
import shlex
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flce_dist.launch.about import about, version_of
from flce_dist.launch.bench import files, megatron_peer
from flce_dist.launch.bench.config import (
    BenchConfig,
    ShapeSpec,
    as_json,
    check_shape,
    load_config,
    runs_of,
)
from flce_dist.launch.bench.divergences import DIVERGENCES
from flce_dist.launch.bench.measure import Measured, free_memory
from flce_dist.launch.bench.peers import PEERS
from flce_dist.launch.bench.problem import Problem, load_head, make_problem, make_truth
from flce_dist.launch.bench.profiles import Profile, describe
from flce_dist.launch.bench.report import Record, make_records, table
from flce_dist.launch.process_group import Group, device_type_of, on_rank_0, rank_and_size, start
from flce_dist.launch.read import digest
from flce_dist.launch.write import check_writable, with_suffix
from flce_dist.launch.yaml_config import require

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_", "TORCH_SYMM_MEM_")
"""How variables begin that decide how collectives run, and beside what."""


def main(args: list[str] | None = None) -> int:
    """Return 1 if a run of ours or a floor is wrong or failed, else 0."""
    rank = launcher_number("RANK", alone=0)
    P = launcher_number("WORLD_SIZE", alone=1)
    argv = sys.argv[1:] if args is None else args
    config = load_config(argv, world_size=P, show_errors=rank == 0)
    device_type = device_type_of(config.device)
    on_gpu = device_type == "cuda"
    require(on_gpu or not config.cuda_graph, "cuda_graph needs a GPU, got device=cpu")
    if rank == 0:
        profiles = [".profile.json"] if config.profile or config.trace else []
        for suffix in (".json", ".csv", *profiles):
            check_writable(with_suffix(config.out, suffix))
    head = None
    if config.head is not None:
        head = load_head(config.head, config.widen)
        check_shape(head.shape, runs_of(config, head.shape), P)
    device, tp_group = start(device_type)
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 170)
    try:
        records = _bench(config, head, device, tp_group, console)
    except KeyboardInterrupt:
        console.print("interrupted: without --fresh the same command goes on")
        raise
    finally:
        megatron_peer.stop()
        if tp_group is None and dist.is_initialized():  # the peer made one for itself
            dist.destroy_process_group()
    failed = [record for record in records if record.is_failure]
    for record in failed:
        line = f"{record.status}: {record.run.name} at {record.shape.name}: {record.message}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(bool(failed))


def _bench(
    config: BenchConfig, head: Problem | None, device: torch.device, tp_group: Group,
    console: Console,
) -> list[Record]:  # fmt: skip
    """Measure every shape that the files do not have; return the records of all."""
    rank, P = rank_and_size(tp_group)
    packages = {peer.package for peer in PEERS.values() if peer.package is not None}
    packages |= {peer.package for peer in DIVERGENCES.values() if peer.package is not None}
    facts = {
        "command": shlex.join(["python", "-m", "flce_dist.launch.bench", *sys.argv[1:]]),
        "ranks": P,
        **about(device),
        "environment": {x: os.environ[x] for x in sorted(os.environ) if x.startswith(VARIABLES)},
        "peers": {package: version_of(package) for package in sorted(packages)},
        "config": as_json(config),
    }
    if config.head is not None and rank == 0:
        facts["head"] = digest(config.head)
    records: list[Record] = []
    if not config.fresh:  # rank 0 alone writes, and other hosts may not see its files
        records = on_rank_0(lambda: files.records_so_far(config.out, facts))
    done = {record.shape for record in records}
    if config.profile or config.trace:
        done &= set(on_rank_0(lambda: files.profiled_so_far(config.out, facts, config.trace)))
    shapes = config.shapes if head is None else (head.shape,)
    in_order = [dataclasses.replace(shape, runs=()) for shape in shapes]
    for number, (shape, alone) in enumerate(zip(shapes, in_order, strict=True), start=1):
        if alone in done:
            console.print(f"{shape.name}: measured before")
            continue
        started = time.monotonic()
        of_shape, profiles = _bench_shape(config, shape, head, device, tp_group, console)
        others = [record for record in records if record.shape != alone]
        records = sorted([*others, *of_shape], key=lambda record: in_order.index(record.shape))
        on_rank_0(partial(files.write_results, config.out, facts, records))
        if profiles:
            of_problem = config.out, facts, shape.problem, profiles
            on_rank_0(partial(files.write_profiles, *of_problem))
        console.print(table(of_shape))
        for name, profile in profiles.items():
            if profile.step_us is not None:
                console.print(f"{name}: {describe(profile)}", highlight=False, markup=False)
        took = f"{time.monotonic() - started:.1f} s"
        console.print(f"shape {number} of {len(shapes)}, {took}", highlight=False)
    console.print(f"records in {with_suffix(config.out, '.json')} and .csv", highlight=False)
    return records


def _bench_shape(
    config: BenchConfig, shape: ShapeSpec, head: Problem | None, device: torch.device,
    tp_group: Group, console: Console,
) -> tuple[list[Record], dict[str, Profile]]:  # fmt: skip
    """Measure every run at one shape and, if asked for, profile it; collective."""
    if head is None:
        problem = make_problem(shape, device, config.seed, tp_group)
    else:
        problem = head.shard(device, tp_group)
    all_measured = [Measured(run, problem, config) for run in runs_of(config, shape)]
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
        refresh_per_second=2,  # seldom: drawing shares the interpreter with the launches timed
    ) as progress:  # fmt: skip
        bar = progress.add_task(
            f"{shape.name}: fp64", total=len(all_measured) * (1 + config.rounds)
        )
        truth = None
        if config.check != "none":
            gradients = config.check == "gradients" and any(
                x.run.has_gradients for x in all_measured
            )
            truth = make_truth(problem, gradients=gradients)
        for measured in all_measured:
            progress.update(bar, description=f"{shape.name}: preparing {measured.run.name}")
            measured.prepare(truth)
            progress.advance(bar)
        del truth
        free_memory(device)
        order = random.Random(config.seed)  # the same on all ranks
        for _ in range(config.rounds):
            for measured in order.sample(all_measured, len(all_measured)):
                progress.update(bar, description=f"{shape.name}: timing {measured.run.name}")
                measured.sample()
                progress.advance(bar)
    records = make_records(shape, all_measured)
    profiles = {}
    for i, measured in enumerate(all_measured):
        if config.profile or config.trace:
            file = files.trace_file(config.out, shape.name, measured.run.name)
            profile = measured.profile(file if config.trace else None)
            if profile is not None:
                profiles[measured.run.name] = profile
                launches = sum(kernel.launches for kernel in profile.kernels)
                records[i] = dataclasses.replace(records[i], launches=launches)
            elif records[i].status == "ok":
                message = f"not profiled: {measured.failure}"
                records[i] = dataclasses.replace(records[i], status="error", message=message)
        measured.release()
    del all_measured, measured, problem
    # Code compiled for one shape must not count towards torch.compile's limit. If there is none,
    # the import takes seconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    free_memory(device)
    return records, profiles


if __name__ == "__main__":
    run_program(main)
