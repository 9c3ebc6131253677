"""What compiles without a GPU: every tile configuration for its chips; and launches of kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flce_dist.kernels import tuning
from flce_dist.kernels.logits import named_columns

ROOT = Path(__file__).parent.parent
PROGRAM = "from tests import aot_compile; aot_compile.main()"
# KiB of shared memory that a block may use. A tile takes as much on all chips of a major version.
CHIPS = {
    (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227,
    (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
# Kernels of logits tiles; the others read by pointers, for which there are no descriptors.
TILES = (
    "linear_stats", "linear_stats cached", "dlogits", "dlogits scaled", "dlogits affine", "profile",
    "kept_dlogits", "add_kept_dhidden", "kept_dweight", "kept_dweight main_grad",
    "linear_stats named", "linear_stats counted", "dlogits counted", "counted_gemm counted",
    "best_pass one", "best_pass rank", "best_pass many", "best_pass sample",
    "pair_logits divergence",
)  # fmt: skip


@pytest.fixture(scope="module")
def printed() -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def compiled(printed: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed if line.startswith("{")]


def describe(facts: dict[str, Any]) -> str:
    return "{arch} {itemsize} bytes T={T} {kernel} group_v={group_v}".format(**facts)


def test_shared_memory_fits(compiled):
    for (major, minor), kib in CHIPS.items():
        fitting = [f for f in compiled if f["arch"] == tuning.arch_of(major, kib << 10)]
        too_large = {describe(f): f["shared"] for f in fitting if f["shared"] > kib << 10}
        assert fitting and not too_large, f"sm_{major}{minor}"


def test_hot_kernels_do_not_spill(compiled):
    spills = {describe(f): f["spilled"] for f in compiled if f["spilled"]}
    assert not spills


def test_passes_over_rows_load_16_bytes_at_once(compiled):
    """If they are specialised on sizes of hidden, as those that follow T are not."""
    rows = [f for f in compiled if f["kernel"] in ("scale", "scale_rows", "logits_at_ids")]
    assert {f["arch"] for f in rows} == set(ARCHS)
    assert not [describe(f) for f in rows if not f["vectors"]]


def test_a_thread_has_whole_packs_of_any_tile():
    for config in (*tuning.TILES.values(), *tuning._ONE_BLOCK.values()):
        elements = config.BLOCK_T * config.BLOCK_V // (32 * config.num_warps)
        assert elements > 0 and elements % named_columns._PACK.value == 0, config


def test_hopper_and_blackwell_use_their_tensor_cores_and_tma(compiled):
    tiles = [f for f in compiled if f["kernel"] in TILES and f["arch"] != "sm_80"]
    assert all(f["tma"] for f in tiles)
    half = [f for f in tiles if f["itemsize"] == 2]
    unit = {"sm_90": "wgmma", "sm_100": "tcgen05"}
    missing = [describe(f) for f in half if f["arch"] in unit and not f[unit[f["arch"]]]]
    assert half and not missing


def test_a_labels_logit_comes_from_the_tensor_cores_of_its_tile(compiled):
    """Another unit would add products in another order, and ranks would miss equal logits."""
    (of_labels,) = (f for f in compiled if f["kernel"] == "label_tiles")
    assert of_labels["arch"] == "sm_90" and of_labels["wgmma"]


def test_a_group_of_columns_is_summed_in_one_order_whatever_the_tile(compiled):
    """Shards and schedules that differ in tiles, caches and tokens give the same bits."""
    best = [f for f in compiled if f["kernel"].startswith("best_pass") and f["group_v"]]
    assert len(best) >= 3 and len(best[0]["orders"]) == 1
    assert all(f["orders"] == best[0]["orders"] for f in best), best
    stats = [f for f in compiled if f["kernel"].startswith("linear_stats") and f["group_v"]]
    assert all(f["orders"] for f in stats)
    for arch in ARCHS:
        for itemsize in (2, 4):
            same = [f["orders"] for f in stats if (f["arch"], f["itemsize"]) == (arch, itemsize)]
            assert len(same) >= 2 and len(same[0]) == 1
            assert all(orders == same[0] for orders in same), (arch, itemsize, same)


def test_both_models_of_a_pair_are_summed_in_one_order(compiled):
    """So that equal models have equal sums, whether or not a pass also reads the first's logits."""
    passes = [f for f in compiled if f["kernel"] == "pair_logits divergence"]
    for shape in {(f["arch"], f["itemsize"], f["T"]) for f in passes}:
        orders = [set(f["orders"]) for f in passes if (f["arch"], f["itemsize"], f["T"]) == shape]
        alone = min(orders, key=len)
        assert len(orders) >= 3 and alone, shape
        assert all(alone <= of_pass for of_pass in orders), shape
