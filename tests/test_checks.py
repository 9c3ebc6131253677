"""Each error of checks.py about tensors and groups, word by word."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.op import checks
from flce_dist.testing import run_ranks
from tests.check_arguments import H, T, V, arguments

FLOAT_DTYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "be a torch.Tensor, got NoneType"),
    "a string": (lambda: "hidden", "be a torch.Tensor, got str"),
    "a list": (lambda: [0.0], "be a torch.Tensor, got list"),
    "sparse": (
        lambda: torch.eye(H).to_sparse(), "be a dense tensor (torch.strided), got torch.sparse_coo"
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.zeros(2, H)], layout=torch.jagged),
        "be a dense tensor (torch.strided), got a nested tensor",
    ),
    "nested, strided": (
        lambda: torch.nested.nested_tensor([torch.zeros(2, H)]),
        "be a dense tensor (torch.strided), got a nested tensor",
    ),
    "bool": (lambda: torch.zeros(T, dtype=torch.bool), f"be one of {FLOAT_DTYPES}, got torch.bool"),
    "complex": (
        lambda: torch.zeros(T, dtype=torch.complex64),
        f"be one of {FLOAT_DTYPES}, got torch.complex64",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(T, H), 0.1, 0, torch.qint8),
        f"be one of {FLOAT_DTYPES}, got torch.qint8",
    ),
    "meta": (lambda: torch.zeros(T, H, device="meta"), "hold data, got a tensor on device meta"),
}  # fmt: skip
TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(())}, "hidden must be [..., H] with H >= 1, got ()"),
    ({"hidden": torch.zeros(T, 0)}, "hidden must be [..., H] with H >= 1, got (6, 0)"),
    ({"weight": torch.zeros(V, 3)}, "weight must be [V, H] with H = 4 from hidden, got (11, 3)"),
    ({"weight": torch.zeros(H)}, "weight must be [V, H] with H = 4 from hidden, got (4,)"),
    (
        {"weight": torch.zeros(V, H).bfloat16()},
        "weight must have hidden's dtype torch.float32, got torch.bfloat16: pass "
        "weight.to(torch.float32) or hidden.to(torch.bfloat16), or call under torch.autocast; "
        "the gradient of each has the dtype that was passed",
    ),
    (
        {"labels": torch.zeros(T)},
        "labels must be one of torch.int64, torch.int32, got torch.float32",
    ),
    ({"bias": torch.zeros(V, 1)}, "bias must be [V] with V = 11 from weight, got (11, 1)"),
    (
        {"bias": torch.zeros(V).half()},
        "bias must have hidden's dtype torch.float32, got torch.float16: pass "
        "bias.to(torch.float32) or hidden.to(torch.float16), or call under torch.autocast; "
        "the gradient of each has the dtype that was passed",
    ),
    (
        {"token_weight": torch.ones(T, 1)},
        "token_weight must have labels' shape (6,), got (6, 1)",
    ),
    (
        {"token_weight": torch.ones(T, dtype=torch.bool)},
        f"token_weight must be one of {FLOAT_DTYPES}, got torch.bool",
    ),
    (
        {"token_weight": torch.ones(T, requires_grad=True)},
        "token_weight must have requires_grad=False, since it gets no gradient, got True",
    ),
]

GROUP: list[tuple[dict[str, Any], str]] = [
    (
        {"sequence_parallel": True},
        "sequence_parallel=True needs a tp_group, got tp_group=None",
    ),
    (
        {"tp_group": "tp"},
        "tp_group must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
        "got 'tp'",
    ),
    (
        {"tp_group": -100},  # torch.distributed.GroupMember.NON_GROUP_MEMBER, of other ranks
        "tp_group must be None or a torch.distributed.ProcessGroup that this rank belongs to, "
        "got -100",
    ),
]

SHAPES: list[tuple[dict[str, Any], str]] = [
    (
        {"labels": torch.zeros(T + 1, dtype=torch.int64)},
        "labels must be (6,) from hidden (6, 4), got (7,)",
    ),
    (
        {"hidden": torch.zeros(2, 3, H)},
        "labels must be (2, 3) from hidden (2, 3, 4), got (6,)",
    ),
    (
        {"weight": torch.zeros(0, H)},
        "weight must have at least one row without vocab_range, got V = 0",
    ),
    (
        {"vocab_size": 12},
        "vocab_size must be within [1, 11], the rows of 1 shards of 11, got 12",
    ),
    (
        {"vocab_range": (0, 11)},
        "vocab_size must be given with vocab_range, since one rank's rows do not determine it, "
        "got None",
    ),
    (
        {"vocab_range": (0, 10), "vocab_size": 11},
        "vocab_range must be half-open (start, end) with end - start = 11 from weight, got (0, 10)",
    ),
    (
        {"vocab_range": (-1, 10), "vocab_size": 11},
        "vocab_range must be half-open (start, end) with end - start = 11 from weight, "
        "got (-1, 10)",
    ),
    (
        {"vocab_range": (1, 12), "vocab_size": 11},
        "vocab_range of the 1 ranks must cover [0, 11), got (1, 12) on rank 0",
    ),
    (
        {"vocab_range": (0, 11), "vocab_size": 12},
        "vocab_range of the 1 ranks must cover [0, 12), got (0, 11) on rank 0",
    ),
]

LABELS: list[tuple[dict[str, Any], str]] = [
    (
        {"labels": torch.tensor([0, 1, 11, 2, 12, -100])},
        "labels must be within [0, 11) or ignore_index -100, got 11 at token 2",
    ),
    (
        {"labels": torch.tensor([0, 1, 2, -1, 2, -100])},
        "labels must be within [0, 11) or ignore_index -100, got -1 at token 3",
    ),
    (
        {"labels": torch.tensor([-100, 1, 2, 3, 2, 1]), "ignore_index": -1},
        "labels must be within [0, 11) or ignore_index -1, got -100 at token 0",
    ),
    (
        {"labels": torch.tensor([0, 1, 2, 3, 9, 1]), "vocab_size": 9},
        "labels must be within [0, 9) or ignore_index -100, got 9 at token 4",
    ),
]
VALUE_ERRORS = [*TENSORS, *GROUP, *SHAPES, *LABELS]


@pytest.mark.parametrize("call", [linear_cross_entropy, linear_cross_entropy_with_metrics])
@pytest.mark.parametrize(("changes", "message"), VALUE_ERRORS, ids=[m for _, m in VALUE_ERRORS])
def test_value_errors(changes: dict[str, Any], message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(**arguments(**changes))


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*quantized tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hidden", "weight", "labels", "bias", "token_weight"])
def test_tensors_of_another_kind(name: str, kind: str) -> None:
    """Under autocast, too, which looks at operands first."""
    make, message = KINDS[kind]
    value = make()
    if name == "labels":
        message = message.replace(FLOAT_DTYPES, "torch.int64, torch.int32")
        value = value.long() if kind in ("sparse", "meta") else value
    if value is None and name in ("bias", "token_weight"):
        return
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with pytest.raises(ValueError) as error:
                linear_cross_entropy(**arguments(**{name: value}))
            assert str(error.value) == f"{name} must {message}"


@pytest.mark.parametrize(
    ("hidden", "labels", "message"),
    [
        (
            (3, H), (3,),
            "labels must be (6,) from hidden (3, 4) for the tokens of all 2 ranks, got (3,)",
        ),
        ((H,), (), "hidden must be [T / P, ..., H] under sequence_parallel=True, got (4,)"),
    ],
)  # fmt: skip
def test_shapes_under_sequence_parallelism(
    hidden: tuple[int, ...], labels: tuple[int, ...], message: str
) -> None:
    changes = {
        "hidden": torch.zeros(hidden),
        "labels": torch.zeros(labels, dtype=torch.int64),
        "sequence_parallel": True,
    }

    def rank(tp_group: torch.distributed.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            linear_cross_entropy(**arguments(tp_group=tp_group, **changes))

    run_ranks(rank, 2)


def test_shards_must_cover_the_vocabulary() -> None:
    def rank(tp_group: torch.distributed.ProcessGroup) -> str:
        start = 11 * tp_group.rank() + 1 - tp_group.rank()
        with pytest.raises(ValueError) as error:
            linear_cross_entropy(
                **arguments(tp_group=tp_group, vocab_size=23, vocab_range=(start, start + 11))
            )
        return str(error.value)

    first, last = run_ranks(rank, 2)
    assert first == "vocab_range of the 2 ranks must cover [0, 23), got (1, 12) on rank 0"
    assert last == "vocab_range of the 2 ranks must cover [0, 23), got (11, 22) on rank 1"


def test_vocab_size_counts_the_rows_of_all_ranks() -> None:
    message = "vocab_size must be within [1, 22], the rows of 2 shards of 11, got 23"

    def rank(tp_group: torch.distributed.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            linear_cross_entropy(**arguments(tp_group=tp_group, vocab_size=23))

    run_ranks(rank, 2)


def test_labels_of_every_kind_pass() -> None:
    labels = torch.tensor([0, V - 1, -100, 3, -100, 5])
    checks.check_labels(labels, V, -100)
    checks.check_labels(labels[:0], V, -100)
