"""``plan`` tells what a call does: compared with the schedule that the call itself was given."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import (
    CallPlan,
    filtered,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    plan,
)
from flce_dist.arguments.decided_once import calls
from flce_dist.schedules.in_forward import InForward
from flce_dist.testing import run_ranks
from tests.parallel_problem import complaint, plan_sizes

T, H, V, R = 48, 16, 96, 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GIB = 1 << 30

IN_CHUNKS: dict[str, Any] = {"max_logits_bytes": 16 * V * 4}
"""With which auto is in_forward, unless something forbids it."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "default, in chunks": ({}, IN_CHUNKS),
    "no gradient": ({"frozen": "hidden weight"}, {}),
    "frozen head": ({"frozen": "weight"}, {}),
    "frozen hidden": ({"frozen": "hidden"}, {}),
    "fp16": ({"dtype": FP16}, {"schedule": "cached"}),
    "bf16": ({"dtype": BF16}, {}),
    "autocast": ({"autocast": BF16}, {"schedule": "cached"}),
    "metrics": ({"metrics": True}, IN_CHUNKS),
    "compiled": ({"compiled": True}, IN_CHUNKS),
    "tokens' losses": ({}, {"reduction": "none", **IN_CHUNKS}),
    "recompute": ({}, {"schedule": "recompute"}),
    "cached, some": ({}, {"schedule": "cached", "max_logits_bytes": 40 * T * 4}),
    "in chunks": ({}, {"schedule": "in_forward", "max_logits_bytes": 16 * V * 4}),
    "padded": ({}, {"vocab_size": 70, "schedule": "cached"}),
    "smoothing and softcap": ({}, {"label_smoothing": 0.1, "softcap": 5.0}),
    "a trained head with a low rank": ({"low_rank": True}, {"schedule": "cached"}),
    "a low rank alone is trained": ({"low_rank": True, "frozen": "weight"}, {}),
    "a low rank, in chunks": ({"low_rank": True, "frozen": "weight hidden"}, IN_CHUNKS),
    "few that count": ({}, {"max_counted": 20, "schedule": "cached"}),
    "filtered": ({}, {"schedule": filtered.schedule(0.1)}),
    "temperature": ({}, {"temperature": torch.full((T,), 0.5)}),
    "two dimensions": ({"shape": (3, 16)}, {}),
}


@pytest.fixture
def small() -> Any:
    with plan_sizes(tile=8, min_window=16, max_window=32, first_lent=8, least_chunk=8):
        yield


def tensors(
    shape: tuple[int, ...] = (T,), dtype: torch.dtype = FP32, frozen: str = "", rows: int = V
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.zeros(*shape, H, dtype=dtype, requires_grad="hidden" not in frozen)
    weight = torch.zeros(rows, H, dtype=dtype, requires_grad="weight" not in frozen)
    labels = torch.zeros(shape, dtype=torch.int64)
    labels.view(-1)[16:] = -100
    return hidden, weight, labels


def schedule_of_latest_call() -> Any:
    return list(calls.values())[-1].schedule


def assert_tells(told: CallPlan, schedule: Any) -> None:
    sizes = getattr(schedule, "recompute", schedule)
    assert (told.tokens, told.columns) == (sizes.T, sizes.V)
    assert (told.cached_columns, told.logits_bytes) == (sizes.cached_v, sizes.logits_bytes)
    assert told.window_columns == (sizes.window_v if sizes.cached_v < sizes.V else 0)
    chunks = sizes.chunks() if isinstance(sizes, InForward) else [(0, sizes.T)]
    assert told.chunks == tuple(end - start for start, end in chunks)
    assert told.lent_columns == sum(n for n, _ in getattr(sizes, "lending", ()))
    name = "cached" if sizes.cached_v else "recompute"
    if isinstance(schedule, InForward):
        name = "in_forward"
    elif schedule is not sizes:
        name = repr(filtered.schedule(schedule.eps))
    assert told.schedule == name
    assert told.schedule in str(told)


class Case:
    """The arguments of one case, for a call and for its plan."""

    def __init__(self, name: str):
        how, options = CASES[name]
        how = dict(how)
        self.flags: dict[str, Any] = {
            "with_metrics": how.pop("metrics", False),
            "compiled": how.pop("compiled", False),
        }
        autocast = how.pop("autocast", None)
        self.context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
        self.is_frozen = bool(how.get("frozen"))
        self.options = dict(options)
        of_low_rank = how.pop("low_rank", "")
        self.operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = tensors(**how)
        hidden, weight, _ = self.operands
        if of_low_rank:
            pair = (hidden.new_zeros(*hidden.shape[:-1], R), weight.new_zeros(len(weight), R))
            self.options["low_rank"] = tuple(x.requires_grad_() for x in pair)

    def plan(self) -> CallPlan:
        hidden, weight, labels = self.operands
        return plan(hidden, weight, labels, **self.flags, **self.options)

    def call(self) -> Any:
        metrics = self.flags["with_metrics"]
        function: Any = linear_cross_entropy_with_metrics if metrics else linear_cross_entropy
        if self.flags["compiled"]:
            function = torch.compile(function, backend="eager")
        return function(*self.operands, **self.options)

    def step(self) -> None:
        result = self.call()
        loss = result.loss if self.flags["with_metrics"] else result
        if loss.requires_grad:
            loss.sum().backward()

    def shapes(self) -> dict[str, Any]:
        """The arguments with shapes in place of tensors that need a gradient."""
        shapes = [x.shape for x in self.operands]
        arguments = dict(zip(("hidden", "weight", "labels"), shapes, strict=True))
        options = dict(self.options)
        if "low_rank" in options:
            options["low_rank"] = tuple(x.shape for x in options["low_rank"])
        return {**arguments, "dtype": self.operands[0].dtype, **self.flags, **options}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_that_of_the_call(name: str) -> None:
    case = Case(name)
    with case.context:
        told = case.plan()
        case.call()
        assert_tells(told, schedule_of_latest_call())
        if not case.is_frozen:
            assert plan(**case.shapes()) == told


@pytest.mark.usefixtures("small")
def test_what_forbids_in_forward() -> None:
    operands = tensors()
    assert plan(*operands, **IN_CHUNKS).schedule == "in_forward"
    forbids: list[dict[str, Any]] = [{"compiled": True}, {"with_metrics": True}]
    for options in (*forbids, {"reduction": "none"}):
        assert plan(*operands, **{**IN_CHUNKS, **options}).schedule == "cached"


@pytest.mark.usefixtures("small")
def test_without_gradients() -> None:
    operands = tensors()
    with torch.no_grad():
        told = plan(*operands)
        linear_cross_entropy(*operands)
        assert_tells(told, schedule_of_latest_call())
    assert told != plan(*operands)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("uneven", [False, True])
def test_on_ranks(uneven: bool) -> None:
    """Hidden is split by token; shards are even, or of 61 and 35 rows."""

    def rank(group: dist.ProcessGroup) -> CallPlan:
        options: dict[str, Any] = {"sequence_parallel": True, "schedule": "cached"}
        start, end = (0, V // 2)
        if uneven:
            start, end = ((0, 61), (61, V))[group.rank()]
            options.update(vocab_range=(start, end), vocab_size=V)
        hidden, weight, _ = tensors((T // 2,), rows=end - start)
        *_, labels = tensors()
        told = plan(hidden, weight, labels, tp_group=group, **options)
        linear_cross_entropy(hidden, weight, labels, tp_group=group, **options)
        assert_tells(told, schedule_of_latest_call())
        shapes = [x.shape for x in (hidden, weight, labels)]
        assert plan(*shapes, dtype=FP32, tp_size=2, **options) == told
        return told

    first, second = run_ranks(rank, 2)
    assert first == second


@pytest.mark.usefixtures("small")
def test_chunks_are_sections_where_hidden_is_split() -> None:
    """Three ranks take 15 tokens where one would take 16."""

    def rank(group: dist.ProcessGroup) -> tuple[tuple[int, ...], list[str]]:
        hidden, weight, _ = tensors((T // 3,), rows=V // 3)
        *_, labels = tensors()
        options: dict[str, Any] = {"sequence_parallel": True, "max_logits_bytes": 16 * V // 3 * 4}
        arguments = {"tp_group": group, "schedule": "in_forward", **options}
        told = plan(hidden, weight, labels, **arguments)
        linear_cross_entropy(hidden, weight, labels, **arguments)
        calls: list[str] = getattr(group, "calls", [])
        return told.chunks, [call for call in calls if "allgather" in call]

    for chunks, gathered in run_ranks(rank, 3):
        assert chunks == (15, 15, 15, 3)
        assert gathered == [f"allgather float32[{tokens // 3 * H}]" for tokens in chunks]


def test_arguments_are_checked_as_those_of_a_call() -> None:
    hidden, weight, labels = tensors()
    quantised = torch.quantize_per_tensor(torch.ones(T), 0.1, 0, torch.qint8)
    both: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((hidden, weight.detach().T, labels), {}),
        ((hidden, weight, labels[:-1]), {}),
        ((hidden, weight.bfloat16(), labels), {}),
        ((hidden, weight, labels.float()), {}),
        ((hidden, weight, labels), {"softcap": -1.0}),
        ((hidden, weight, labels), {"temperature": 0.0}),
        ((hidden, weight, labels), {"temperature": torch.ones(T - 1)}),
        ((hidden, weight, labels), {"token_weight": torch.ones(T, requires_grad=True)}),
        ((hidden, weight, labels), {"token_weight": quantised}),
        ((hidden, weight, labels[1:]), {"token_weight": torch.ones(T)}),
        ((hidden.detach().to_sparse(), weight, labels), {}),
        ((hidden, weight.detach().to_sparse(), labels), {}),
        ((hidden.half(), weight, labels.to_sparse()), {}),
        ((hidden, weight, labels), {"low_rank": (hidden[:, :R], weight[:, :R].to_sparse())}),
        ((hidden, weight, labels), {"vocab_size": V + 1}),
        ((hidden, weight, labels), {"tp_group": "tp"}),
        ((hidden, weight, labels), {"low_rank": hidden}),
        ((hidden, weight, labels), {"low_rank": (hidden[:, :R], weight[:, :R].bfloat16())}),
        ((hidden, weight, labels), {"low_rank": (hidden[1:, :R], weight[:, :R])}),
        ((hidden, weight.T, labels), {"low_rank": (hidden[:, :R], weight[:, :R])}),
        ((hidden, weight, labels), {"schedule": "cached", "softcap": 5.0, "label_smoothing": 0.1}),
        ((hidden, weight, labels), {"reduction": "none", "schedule": "in_forward"}),
        ((hidden.double(), weight.double(), labels), {"impl": "triton"}),
        ((hidden, weight, labels), {"impl": "eager", "tp_invariant": True}),
        # Of two wrong arguments the one that a call names.
        ((hidden, weight, labels), {"low_rank": hidden, "vocab_size": V + 1}),
        ((hidden, weight, labels), {"low_rank": hidden, "tp_invariant": True, "impl": "eager"}),
        ((hidden, weight, labels), {"tp_invariant": True, "impl": "eager", "vocab_size": V + 1}),
        ((hidden.double(), weight.double(), labels), {"impl": "triton", "vocab_size": V + 1}),
        (
            (hidden, weight, labels),
            {"tp_invariant": True, "reduction": "none", "schedule": "in_forward"},
        ),
    ]
    for operands, options in both:
        said = []
        for function in (linear_cross_entropy, plan):
            with pytest.raises((ValueError, NotImplementedError)) as error:
                function(*operands, **options)
            said.append(str(error.value))
        assert said[0] == said[1]
    for of_call in ({"accumulate_dweight": True}, {"schedule": "in_forward", "with_metrics": True}):
        with pytest.raises(NotImplementedError, match=r"exclude the call by torch.compiler.disab"):
            plan(hidden, weight, labels[1:], compiled=True, **of_call)
    shapes = hidden.shape, weight.shape, labels.shape
    assert plan(*shapes, tp_invariant=True) == plan(*shapes, tp_invariant=True, impl="triton")
    with pytest.raises(
        NotImplementedError, match=r"impl='triton' computes .* hidden is torch.float64"
    ):
        plan(*shapes, dtype=torch.float64, impl="triton")
    assert plan(*shapes, dtype=torch.float64).tokens == T
    both_groups = complaint(plan, hidden, weight, labels, tp_size=2, tp_group="tp")
    assert both_groups == "tp_size must be None with a tp_group, got 2"
    no_int = "a size of hidden must be an int within [0, 2**63), got 1.5"
    assert complaint(plan, (1.5, H), (V, H), (T,)) == no_int
    assert complaint(plan, 5, (V, H), (T,)) == "hidden must be a tensor or its shape, got 5"


def test_no_memory_is_taken_and_no_value_read() -> None:
    with torch.device("meta"):
        operands = tensors((1 << 16,), BF16, rows=1 << 17)
    assert plan(*operands) == plan(*(x.shape for x in operands))


def test_the_call_of_the_readme() -> None:
    told = plan((8192, 4096), (128256, 4096), (8192,))
    assert (told.schedule, told.logits_bytes) == ("in_forward", GIB)
    assert str(told) == (
        "schedule in_forward: 8192 tokens, 128256 columns\n"
        "GEMMs: 3 in forward, 0 in backward\n"
        "memory beyond gradients: 1.13 GiB\n"
        "logits: 1.00 GiB at most\n"
        "cached: 128256 columns, 62720 of them in dweight's memory"
    )
