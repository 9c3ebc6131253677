"""Errors of rows by frequency, compared with dense fp64 gradients and PyTorch's own Adam."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro")
pytest.importorskip("rich")

from flce_dist.launch.bench import rare_rows
from flce_dist.launch.bench.rare_rows import RowsRecord
from tests.filtered_formula import definition, exact, zipf_inputs
from tests.problems import Inputs, Patch
from tests.test_bench_filtered import as_head

T, V, H, BATCHES, EPS = 256, 8192, 16, 3, 2.0**-8
RUNS = [("torch_eager", None), ("eager", EPS), ("dropped", EPS)]

given = zipf_inputs(BATCHES * T, V, H, ignored=0.0)
batches = [
    Inputs(given.hidden[cut], given.weight, given.labels[cut])
    for cut in (slice(i * T, (i + 1) * T) for i in range(BATCHES))
]


def measured() -> list[RowsRecord]:
    return rare_rows.measure(as_head(given).batches(T), (EPS,))


def dweights(run: str) -> list[Tensor]:
    """fp64 gradients of the batches; rows are in order of frequency."""
    if run in ("exact", "torch_eager"):
        return [exact(batch, torch.float64)["dweight"] for batch in batches]
    return [definition(batch, EPS, drops=run == "dropped").dweight for batch in batches]


def last_update(gradients: list[Tensor]) -> Tensor:
    x = torch.zeros_like(gradients[0], requires_grad=True)
    adam = torch.optim.Adam([x], lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    before = x
    for x.grad in gradients:
        before = x.detach().clone()
        adam.step()
    return before - x.detach()


@functools.cache
def expected(run: str) -> dict[str, Tensor]:
    """Of each row."""
    truth, found = dweights("exact"), dweights(run)
    kept = definition(batches[0], EPS).kept.any(0).repeat_interleave(256)
    wanted, update = last_update(truth), last_update(found)
    return {
        "label_share": torch.bincount(batches[0].labels, minlength=V).clamp(max=1).double(),
        "rank_one_share": (~kept & (run != "torch_eager")).double(),
        "error_p50": (found[0] - truth[0]).norm(dim=1) / truth[0].norm(dim=1),
        "error_p90": (found[0] - truth[0]).norm(dim=1) / truth[0].norm(dim=1),
        "cosine_p50": cosine(found[0], truth[0]),
        "update_error_p50": (update - wanted).norm(dim=1) / wanted.norm(dim=1),
        "update_cosine_p50": cosine(update, wanted),
        "update_ratio_p50": update.norm(dim=1) / wanted.norm(dim=1),
    }


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return torch.cosine_similarity(x, y, dim=1, eps=1e-300)


def check(records: list[RowsRecord]) -> None:
    places = {0: 255, 256: 1023, 1024: 4095, 4096: V - 1}
    assert [(r.first, r.last, r.impl, r.filter_eps) for r in records] == [
        (*place, *run) for place in places.items() for run in RUNS
    ]
    for run, _ in RUNS:
        rows = expected(run)
        for record in records:
            if record.impl == run:
                compare(
                    record, {name: x[record.first : record.last + 1] for name, x in rows.items()}
                )


def compare(record: RowsRecord, rows: dict[str, Tensor]) -> None:
    for name, x in rows.items():
        kind = name.rpartition("_")[2]
        wanted = x.mean() if kind == "share" else x.quantile(float(kind[1:]) / 100)
        found = getattr(record, name)
        assert found == pytest.approx(float(wanted), rel=2e-3, abs=1e-4), (name, record)


def test_each_bucket_has_the_errors_of_its_rows() -> None:
    records = measured()
    check(records)
    assert {(r.T, r.H, r.V, r.dtype, r.batches) for r in records} == {(T, H, V, "fp32", BATCHES)}
    rarest = {record.impl: record for record in records if record.first == 4096}
    assert 0 < rarest["eager"].rank_one_share < 1
    assert rarest["eager"].update_error_p50 < rarest["dropped"].update_error_p50


def test_rank_one_rows_are_counted_in_bf16() -> None:
    """Rows that few blocks keep are parallel up to rounding, but not of rank one."""
    given = zipf_inputs(T, V, H, torch.bfloat16, ignored=0.0)
    never_kept = ~definition(given, EPS).kept.any(0).repeat_interleave(256)
    assert never_kept.any() and not never_kept.all()
    for record in rare_rows.measure([as_head(given)], (EPS,)):
        wanted = never_kept[record.first : record.last + 1] & (record.filter_eps is not None)
        assert record.rank_one_share == pytest.approx(float(wanted.double().mean()), rel=1e-3)


def shifted(buckets: Any, counts: Tensor) -> Any:
    rows = torch.cat([rows for _, rows in buckets(counts)]).roll(16)
    return ((first, rows[first : first + len(x)]) for first, x in buckets(counts))


def of_first_batch(step: Any, adam: rare_rows.Adam, gradient: Tensor) -> None:
    if not adam.steps:
        step(adam, gradient)


def uncorrected(update: Any, adam: rare_rows.Adam) -> Tensor:
    return adam.m / (adam.v.sqrt() + rare_rows.ADAM_EPS)


def not_normalised(update: Any, adam: rare_rows.Adam) -> Tensor:
    return adam.m


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (rare_rows, "_buckets", shifted),
        (rare_rows.Adam, "step", of_first_batch),
        (rare_rows.Adam, "update", uncorrected),
        (rare_rows.Adam, "update", not_normalised),
    ],
    ids=["buckets", "steps", "bias correction", "normalisation"],
)
def test_a_mistake_is_found(
    mutate: Patch, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    mutate(owner, name, wrong)
    with pytest.raises(AssertionError, match="p50"):
        check(measured())
