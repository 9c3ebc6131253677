"""``linear_divergence`` on several ranks, whose teacher is sharded as the student, or otherwise."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist import linear_divergence
from flce_dist.divergence import teacher_shard
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms, run_ranks
from tests.divergence_problem import (
    H_T,
    KINDS,
    METRICS,
    T,
    V,
    compare,
    each_kind,
    of_ranks,
    on_ranks,
    problem,
    run_op,
    run_reference,
)
from tests.parallel_problem import complaint
from tests.problems import each_dtype, pairwise

WAYS: list[dict[str, Any]] = [
    {"reduction": "mean", "max_logits_bytes": 1},
    {"reduction": "none"},
    {"reduction": "none", "schedule": "recompute"},
]


@pytest.mark.parametrize(
    ("kind", "P", "split", "way"),
    pairwise((k, P, s, w) for k in KINDS for P in (2, 3, 8) for s in (0, 1) for w in range(3)),
)
def test_on_ranks(kind: str, P: int, split: int, way: int) -> None:
    tokens = (24,) if split else (T,)
    given = problem(torch.float64, kind=kind, vocab_size=V - 3, tokens=tokens, **WAYS[way])
    found = on_ranks(given, P, sequence_parallel=bool(split), with_metrics=True)
    compare(found, given, with_metrics=True)
    assert not found["dweight"][V - 3 :].any()


@each_kind
def test_shards_without_a_column(kind: str) -> None:
    given = problem(torch.float64, kind=kind, rows=9, tokens=(16,))
    found = on_ranks(given, 8, sequence_parallel=True, with_metrics=True)
    compare(found, given, with_metrics=True)


@pytest.mark.parametrize("options", [{"reduce_dhidden": False}, {"reduce_in_fp32": True}], ids=str)
def test_who_sums_dhidden(options: dict[str, Any]) -> None:
    given = problem(torch.float64)
    first, second = (x["dhidden"] for x in of_ranks(given, 2, **options))
    total = first if "reduce_in_fp32" in options else first + second
    assert relative_rms(total, run_reference(given)["dhidden"]) <= 1e-11


@each_dtype
@each_kind
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_interpreted_kernels_on_two_ranks(kind: str, dtype: torch.dtype) -> None:
    given = problem(dtype, kind=kind, tokens=(16,), max_logits_bytes=1)
    found = on_ranks(given, 2, "triton", sequence_parallel=True, with_metrics=True)
    compare(found, given, with_metrics=True)


@each_kind
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_values_do_not_depend_on_the_number_of_ranks(kind: str) -> None:
    options: dict[str, Any] = {"vocab_size": V, "tp_invariant": True, "reduction": "none"}
    given = problem(torch.bfloat16, kind=kind, rows=192, tokens=(16,), **options)
    one = run_op(given, "triton", with_metrics=True)
    compare(one, given, with_metrics=True)
    names = ("loss", *METRICS)
    for P in (2, 3):
        found = on_ranks(given, P, "triton", with_metrics=True)
        for name in names:
            assert torch.equal(found[name], one[name]), (P, name)
        assert torch.equal(on_ranks(given, P, "triton")["loss"], one["loss"])


@pytest.mark.parametrize("how", [{"max_counted": 20}, {"skip_ignored": True}], ids=str)
@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_tokens_that_count_alone(impl: str, how: dict[str, Any]) -> None:
    given = problem(tokens=(24,), ignored=0.5, kind="jsd", **how)
    compare(on_ranks(given, 2, impl, sequence_parallel=True), given)


def test_sequences_that_are_split_along_their_second_dimension() -> None:
    temperature = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    given = problem(torch.float64, tokens=(3, 4), temperature=temperature, reduction="none")
    truth = run_reference(given)
    found = of_ranks(given, 2, sequence_parallel=True, sequence_dim=1)
    assert relative_rms(found[1]["loss"], truth["loss"]) <= 1e-11
    for name, dim in (("dhidden", 1), ("dweight", 0), ("dbias", 0)):
        joined = torch.cat([of_rank[name] for of_rank in found], dim)
        assert relative_rms(joined, truth[name]) <= 1e-11, name


@each_kind
def test_collectives(kind: str) -> None:
    """Gathers of both models' tokens and of each chunk's statistics; then the sum of dhidden."""
    given = problem(kind=kind, tokens=(24,), max_logits_bytes=1)
    (calls, _) = (x["calls"] for x in of_ranks(given, 2, sequence_parallel=True))
    names = [call.split()[0] if isinstance(call, str) else str(call) for call in calls]
    gathers = sum("gather" in name for name in names)
    assert gathers == 2 + (1 if kind.endswith("kl") else 2), names
    assert sum("scatter" in name for name in names) == 1 and len(names) == gathers + 1, names


def test_a_teacher_that_is_padded_otherwise() -> None:
    """Its shards begin at other ids: refused on all ranks, and right once it is cut anew."""
    given = problem(torch.float64, rows=V, teacher_rows=V + 10, vocab_size=V)
    expected = run_reference(given)

    def one(group: dist.ProcessGroup, cut: bool) -> Any:
        start, end = vocab_range(V, group.rank(), 2)
        theirs = slice(*vocab_range(V + 10, group.rank(), 2))
        weight, bias = given.teacher_weight[theirs], given.teacher_bias
        assert bias is not None and given.bias is not None
        bias = bias[theirs]
        if cut:
            weight, bias = (teacher_shard(x, (start, end), tp_group=group) for x in (weight, bias))
        own = given.weight[start:end].clone().requires_grad_()
        loss = linear_divergence(
            given.hidden,
            own,
            given.teacher_hidden,
            weight,
            bias=given.bias[start:end],
            teacher_bias=bias,
            tp_group=group,
            **given.options,
        )
        loss.backward()
        return loss.detach(), own.grad

    with pytest.raises(ValueError, match="teacher_weight must have the rows of the same ids"):
        run_ranks(lambda group: one(group, False), 2)
    ranks = run_ranks(lambda group: one(group, True), 2)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert relative_rms(ranks[0][0], expected["loss"]) <= 1e-11
    dweight = torch.cat([x[1] for x in ranks])
    assert relative_rms(dweight, expected["dweight"]) <= 1e-11


@pytest.mark.parametrize("P", [1, 3])
def test_a_teachers_rows_for_a_student_of_fewer_ids(P: int) -> None:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:40]
    whole = torch.randn(V, H_T)

    def one(group: dist.ProcessGroup) -> torch.Tensor:
        start, end = vocab_range(V, group.rank(), P)
        own = ids.tensor_split(P)[group.rank()]
        found = teacher_shard(whole[start:end], own, tp_group=group, teacher_start=start)
        assert torch.equal(found, whole[own])
        return teacher_shard(whole[start:end], own, tp_group=group)

    assert torch.equal(torch.cat(run_ranks(one, P)), whole[ids])
    with pytest.raises(
        ValueError, match=r"rows must be within the teacher's vocabulary, got \[150"
    ):
        teacher_shard(whole, (140, V + 1))
    of_rows: list[Any] = [(8, 0), (-1, 8), 3, (1, 2, 3), None, torch.zeros(2, 2).long()]
    for rows in of_rows:
        with pytest.raises(ValueError, match=r"^rows must be "):
            teacher_shard(whole, rows)
    starts: list[Any] = [-1, 0.5, "0", [0], 2**63, torch.tensor(0), True]
    for start in starts:
        with pytest.raises(ValueError, match=r"^teacher_start must be None or an int within \[0"):
            teacher_shard(whole, (0, 8), teacher_start=start)
    for weight in (whole[0, 0], whole[None]):
        with pytest.raises(ValueError, match=r"^teacher_weight must be \[V', H'\], or \[V'\] of"):
            teacher_shard(weight, (0, 8))


def test_a_teachers_dtensor_is_refused_with_a_way_out() -> None:
    def one(group: dist.ProcessGroup) -> str:
        weight = DTensor.from_local(
            torch.zeros(8, H_T), DeviceMesh.from_group(group, "cpu"), [Shard(0)]
        )
        own = weight.to_local()
        assert teacher_shard(own, (0, 8), tp_group=group).shape == (8, H_T)
        ids = DTensor.from_local(torch.arange(8), weight.device_mesh, [Shard(0)])
        said = complaint(teacher_shard, own, ids, tp_group=group)
        assert said.endswith("got a DTensor: pass rows.to_local()")
        return complaint(teacher_shard, weight, (0, 8), tp_group=group)

    for said in run_ranks(one, 2):
        assert said.endswith("got a DTensor: pass teacher_weight.to_local()")


@pytest.mark.usefixtures("ranks_compared")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rows": (8, 0)}, "rank 1 raised ValueError: rows must be (start, end)"),
        ({"teacher_weight": torch.zeros(8, H_T, dtype=torch.float64)}, "dtype is 'torch.float32'"),
        ({"teacher_weight": torch.zeros(8, H_T + 1)}, "H' of teacher_weight is"),
    ],
    ids=["refused", "dtype", "columns"],
)
def test_all_ranks_raise_where_one_cannot_share_a_teacher(
    changes: dict[str, Any], told: str
) -> None:
    def one(group: dist.ProcessGroup) -> str:
        usual: dict[str, Any] = {"teacher_weight": torch.zeros(8, H_T), "rows": (0, 8)}
        mine = usual | (changes if group.rank() == 1 else {})
        return complaint(teacher_shard, **mine, tp_group=group)

    of_rank_0, of_rank_1 = run_ranks(one, 2)
    assert told in of_rank_0
    assert of_rank_0.startswith("ranks must call alike: ")
    assert of_rank_1 == of_rank_0 or "rows" in changes


@pytest.mark.parametrize(
    ("name", "usual", "words"),
    [
        ("teacher_softcap", 5.0, r"plan is .*softcap 5\.0.* on rank 0 and .*softcap 6\.0"),
        ("teacher_logit_scale", 5.0, r"plan is .*logit_scale 5\.0.* on rank 0"),
        ("teacher_temperature", torch.ones(8), "hash of teacher_temperature is"),
        ("temperature", torch.ones(8), "hash of temperature is"),
        ("beta", 0.5, r"plan is .*beta=0\.5.* on rank 0"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_ranks_of_other_teachers(
    name: str, usual: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", "1")
    given = problem(tokens=(8,))

    def one(group: dist.ProcessGroup) -> None:
        start, end = vocab_range(V, group.rank(), 2)
        step = 0.1 if name == "beta" else 1.0
        options: dict[str, Any] = {name: usual + step * group.rank()}
        linear_divergence(
            given.hidden,
            given.weight[start:end],
            given.teacher_hidden,
            given.teacher_weight[start:end],
            tp_group=group,
            kind="jsd",
            **options,
        )

    with pytest.raises(ValueError, match=f"ranks must call alike: {words}"):
        run_ranks(one, 2)


@pytest.mark.parametrize("how", ["even", "ranges", "dtensor"])
def test_a_student_of_fewer_ids(how: str) -> None:
    """Each rank's ids have their rows in the teacher's shard there, which begins at its own id."""
    given = problem(torch.float64, rows=10, teacher_rows=40, vocab_size=10)
    starts = torch.arange(10) // 5 * 20
    rows = starts + torch.tensor([3, 0, 19, 7, 8, 1, 2, 18, 5, 11])
    truth = given.changed(teacher_rows=rows)
    expected = run_reference(truth)

    def one(group: dist.ProcessGroup) -> Any:
        here = slice(*vocab_range(10, group.rank(), 2))
        theirs = slice(*vocab_range(40, group.rank(), 2))
        options: dict[str, Any] = {**given.options, "teacher_rows": rows[here], "tp_group": group}
        assert given.teacher_bias is not None and given.bias is not None
        own: Any = given.weight[here].clone()
        bias: Any = given.bias[here]
        if how == "ranges":
            options["vocab_range"] = here.start, here.stop
        if how == "dtensor":
            mesh = DeviceMesh.from_group(group, "cpu")
            own, bias = (DTensor.from_local(x, mesh, [Shard(0)]) for x in (own, bias))
            del options["vocab_size"]
        own.requires_grad_()
        loss = linear_divergence(
            given.hidden,
            own,
            given.teacher_hidden,
            given.teacher_weight[theirs],
            bias=bias,
            teacher_bias=given.teacher_bias[theirs],
            **options,
        )
        loss.backward()
        return loss.detach(), own.grad.to_local() if how == "dtensor" else own.grad

    found = run_ranks(one, 2)
    for loss, _ in found:
        assert relative_rms(loss, expected["loss"]) <= 1e-11
    dweight = torch.cat([of_rank for _, of_rank in found])
    assert relative_rms(dweight, expected["dweight"]) <= 1e-11


def test_a_rank_that_refuses_its_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise, with its words, before any of them gathers anything."""
    monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", "1")
    given = problem(tokens=(8,))

    def one(group: dist.ProcessGroup) -> tuple[str, Any]:
        start, end = vocab_range(V, group.rank(), 2)
        theirs = given.teacher_weight[start : end - group.rank()]
        operands = given.hidden, given.weight[start:end], given.teacher_hidden, theirs
        with pytest.raises(ValueError, match="teacher_weight must have the 75 rows") as error:
            linear_divergence(*operands, tp_group=group)
        return str(error.value), getattr(group, "calls", None)

    (of_first, calls), (_, others) = run_ranks(one, 2)
    assert "rank 1 raised ValueError: teacher_weight" in of_first
    assert calls == others and not any("float" in call for call in calls), calls


def test_each_ranks_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that does not fit on one rank alone is an error on all."""
    monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", "1")
    given = problem(tokens=(8,))

    def one(group: dist.ProcessGroup) -> None:
        start, end = vocab_range(V, group.rank(), 2)
        theirs = (start + group.rank(), end + group.rank())
        linear_divergence(
            given.hidden,
            given.weight[start:end],
            given.teacher_hidden,
            given.teacher_weight[start:end],
            tp_group=group,
            vocab_range=(start, end),
            vocab_size=V,
            teacher_vocab_range=theirs,
        )

    with pytest.raises(ValueError, match=r"is_aligned=False.* on rank 1"):
        run_ranks(one, 2)


@pytest.mark.parametrize("trains_weight", [True, False])
def test_hidden_is_gathered_again_for_dweight_alone(trains_weight: bool) -> None:
    """In backward of D that forward kept; dhidden needs none."""
    given = problem(tokens=(24,), schedule="cached")

    def rank(group: Any) -> list[str]:
        mine = slice(12 * group.rank(), 12 * group.rank() + 12)
        shard = slice(75 * group.rank(), 75 * group.rank() + 75)
        hidden = given.hidden[mine].clone().requires_grad_()
        weight = given.weight[shard].clone().requires_grad_(trains_weight)
        teacher = given.teacher_hidden[mine], given.teacher_weight[shard]
        options: dict[str, Any] = {"tp_group": group, "sequence_parallel": True}
        loss = linear_divergence(hidden, weight, *teacher, schedule="cached", **options)
        earlier = len(group.calls)
        loss.backward()
        return [call.split()[0] for call in group.calls[earlier:]]

    expected = ["allgather"] * trains_weight + ["reduce_scatter"]
    assert run_ranks(rank, 2) == [expected] * 2
