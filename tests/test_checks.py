"""Each error about tensors and options, word by word; test_check_options.py has single values."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.arguments.passed import Arguments
from flce_dist.testing import run_ranks
from tests.parallel_problem import complaint

T, V, H = 6, 11, 4
FLOAT_DTYPES = "torch.float32, torch.bfloat16, torch.float16 or torch.float64"
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "be a torch.Tensor, got NoneType"),
    "a list": (lambda: [0.0], "be a torch.Tensor, got list: pass torch.as_tensor(NAME)"),
    "of NumPy": (
        lambda: np.zeros((T, H), np.float32),
        "be a torch.Tensor, got ndarray: pass torch.as_tensor(NAME)",
    ),
    "a layer": (
        lambda: torch.nn.Linear(H, V), "be a torch.Tensor, got Linear: pass NAME.weight"
    ),
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
    "bool": (
        lambda: torch.zeros(T, dtype=torch.bool),
        f"have dtype {FLOAT_DTYPES}, got torch.bool: pass NAME.float()",
    ),
    "complex": (
        lambda: torch.zeros(T, dtype=torch.complex64),
        f"have dtype {FLOAT_DTYPES}, got torch.complex64",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(T, H), 0.1, 0, torch.qint8),
        f"have dtype {FLOAT_DTYPES}, got torch.qint8",
    ),
    "meta": (lambda: torch.zeros(T, H, device="meta"), "hold data, got a tensor on device meta"),
}  # fmt: skip

ANOTHER_DTYPE = (
    "{0} must have hidden's dtype torch.float32, got {1}: pass {0}.to(torch.float32) or "
    "hidden.to({1}), or call under torch.autocast; the gradient of each has the dtype that was "
    "passed"
)
NO_MEMBER = (
    "tp_group must be None or a torch.distributed.ProcessGroup that this rank belongs to, got "
)
NO_GRADIENT = "temperature must have requires_grad=False, since it gets no gradient, got True"
OTHER_ROWS = "vocab_range must be half-open (start, end) with end - start = 11 from weight, got "
LOGITS_OR_TRANSPOSED = (
    ": if hidden holds logits, pass the output layer's input; if weight is [H, V], pass weight.T"
)
BOTH_SUM = "leaves the sum over ranks to the caller"

# What each ValueError says, and the arguments that cause it.
VALUE_ERRORS: dict[str, dict[str, Any]] = {
    # tensors
    "hidden must be [..., H] with H >= 1, got ()": {"hidden": torch.zeros(())},
    "hidden must be [..., H] with H >= 1, got (6, 0)": {"hidden": torch.zeros(T, 0)},
    "weight must be [V, H] with H = 4 from hidden, got (11, 3)": {"weight": torch.zeros(V, 3)},
    "weight must be [V, H] with H = 4 from hidden, got (4,)": {"weight": torch.zeros(H)},
    ANOTHER_DTYPE.format("weight", "torch.bfloat16"): {"weight": torch.zeros(V, H).bfloat16()},
    (
        "labels must have dtype torch.int64 or torch.int32, got torch.float32: pass labels.long() "
        "if they are ids"
    ): {"labels": torch.zeros(T)},
    "bias must be [V] with V = 11 from weight, got (11, 1): pass bias.reshape((11,))": {
        "bias": torch.zeros(V, 1)
    },
    ANOTHER_DTYPE.format("bias", "torch.float16"): {"bias": torch.zeros(V).half()},
    "token_weight must be (6,), as tokens, got (6, 1): pass token_weight.reshape((6,))": {
        "token_weight": torch.ones(T, 1)
    },
    "temperature must be (6,), as tokens, got (1,): pass float(temperature)": {
        "temperature": torch.ones(1)
    },
    "temperature must be (6,), as tokens, got (2,)": {"temperature": torch.ones(2)},
    f"{NO_GRADIENT}: pass temperature.detach()": {
        "temperature": torch.ones(T, requires_grad=True)
    },
    f"temperature must have dtype {FLOAT_DTYPES}, got torch.int64: pass temperature.float()": {
        "temperature": torch.ones(T, dtype=torch.int64)},
    f"{NO_GRADIENT}: pass token_weight.detach()".replace("temperature", "token_weight", 1): {
        "token_weight": torch.ones(T, requires_grad=True)
    },
    # groups; -100 is torch.distributed.GroupMember.NON_GROUP_MEMBER
    "sequence_parallel=True needs a tp_group, got tp_group=None": {"sequence_parallel": True},
    f"{NO_MEMBER}'tp'": {"tp_group": "tp"},
    f"{NO_MEMBER}-100": {"tp_group": -100},
    # shapes
    f"weight must be [V, H] with H = 4 from hidden, got (4, 11){LOGITS_OR_TRANSPOSED}": {
        "weight": torch.zeros(H, V)
    },
    f"weight must be [V, H] with H = 11 from hidden, got (11, 4){LOGITS_OR_TRANSPOSED}": {
        "hidden": torch.zeros(T, V)
    },
    "labels must be (6,) from hidden (6, 4), got (6, 1): pass labels.reshape((6,))": {
        "labels": torch.zeros(T, 1).long()
    },
    "labels must be (6,) from hidden (6, 4), got (2, 3): pass labels.reshape((6,))": {
        "labels": torch.zeros(2, 3).long(), "token_weight": torch.ones(T)
    },
    "labels must be (3, 2) from hidden (3, 2, 4), got (2, 3): pass labels.T": {
        "hidden": torch.zeros(3, 2, H), "labels": torch.zeros(2, 3).long()
    },
    "labels must be (6,) from hidden (6, 4), got (7,)": {"labels": torch.zeros(T + 1).long()},
    "labels must be (2, 3) from hidden (2, 3, 4), got (6,): pass labels.reshape((2, 3))": {
        "hidden": torch.zeros(2, 3, H)
    },
    "labels must be (6,) from hidden (6, 4), got (3, 2): pass labels.reshape((6,))": {
        "labels": torch.zeros(3, 2).long()
    },
    "weight must have at least one row without vocab_range, got V = 0": {
        "weight": torch.zeros(0, H)
    },
    "vocab_size must be within [1, 11], the rows of 1 shards of 11, got 12": {"vocab_size": 12},
    "vocab_size must be given with vocab_range, since one rank's rows do not determine it, got "
    "None": {"vocab_range": (0, 11)},
    f"{OTHER_ROWS}(0, 10)": {"vocab_range": (0, 10), "vocab_size": 11},
    f"{OTHER_ROWS}(-1, 10)": {"vocab_range": (-1, 10), "vocab_size": 11},
    "vocab_range of the 1 ranks must cover [0, 11), got (1, 12) on rank 0": {
        "vocab_range": (1, 12), "vocab_size": 11
    },
    # labels
    "labels must be within [0, 11) or ignore_index -100, got 11 at token 2": {
        "labels": torch.tensor([0, 1, 11, 2, 12, -100])
    },
    "labels must be within [0, 11) or ignore_index -100, got -1 at token 3: to leave such tokens "
    "out, give them the label -100 or pass ignore_index=-1": {
        "labels": torch.tensor([0, 1, 2, -1, 2, -100])
    },
    "labels must be within [0, 11) or ignore_index -1, got -100 at token 0: to leave such tokens "
    "out, give them the label -1 or pass ignore_index=-100": {
        "labels": torch.tensor([-100, 1, 2, 3, 2, 1]), "ignore_index": -1
    },
    "labels must be within [0, 9) or ignore_index -100, got 9 at token 4: pass a larger vocab_size "
    "if weight has a row 9 that is no padding": {
        "labels": torch.tensor([0, 1, 2, 3, 9, 1]), "vocab_size": 9
    },
    # options that contradict each other
    f"reduce_dhidden=False {BOTH_SUM}, but sequence_parallel=True makes it part of the "
    "reduce-scatter; drop one of the two": {"sequence_parallel": True, "reduce_dhidden": False},
    f"reduce_in_fp32=True sums dhidden over ranks in fp32, but reduce_dhidden=False {BOTH_SUM}; "
    "drop one of the two": {"reduce_in_fp32": True, "reduce_dhidden": False},
}  # fmt: skip

CAPPED = {"softcap": 5.0, "label_smoothing": 0.1}
NEEDS_LOGITS = (
    "schedule='{}' keeps exponentials, but label_smoothing with softcap needs the logits; use "
    "schedule='recompute'"
)
DOUBLES = {"hidden": torch.zeros(T, H).double(), "weight": torch.zeros(V, H).double()}
NOT_IMPLEMENTED: dict[str, dict[str, Any]] = {
    "schedule='in_forward' with an upstream gradient of each token (reduction='none', scores) "
    "needs a weight and bias that need no gradient, and no metrics or entropy: use "
    "schedule='recompute' or 'cached'": {
        "schedule": "in_forward",
        "reduction": "none",
    },
    NEEDS_LOGITS.format("cached"): {"schedule": "cached", **CAPPED},
    NEEDS_LOGITS.format("in_forward"): {"schedule": "in_forward", **CAPPED},
    "filtered.schedule needs softcap=None, since a softcap's slope differs between the columns of "
    "a tile, got softcap=5.0": {"schedule": filtered.schedule(0.0), "softcap": 5.0},
    "filtered.schedule needs tp_invariant=False, since tiles are counted from the first row of "
    "each rank, got tp_invariant=True": {"schedule": filtered.schedule(0.1), "tp_invariant": True},
    "impl='triton' computes in float32, bfloat16 and float16; hidden is torch.float64: use "
    "impl='eager'": {"impl": "triton", **DOUBLES},
}


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments, but for ``changes``."""
    return {
        "hidden": torch.zeros(T, H, requires_grad=True),
        "weight": torch.zeros(V, H, requires_grad=True),
        "labels": torch.zeros(T, dtype=torch.int64),
        **changes,
    }


@pytest.mark.parametrize("call", [linear_cross_entropy, linear_cross_entropy_with_metrics])
@pytest.mark.parametrize("message", [*VALUE_ERRORS, *NOT_IMPLEMENTED])
def test_words_of_each_error(message: str, call: Any) -> None:
    error = ValueError if message in VALUE_ERRORS else NotImplementedError
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**arguments(**{**VALUE_ERRORS, **NOT_IMPLEMENTED}[message]))


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*quantized tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*Arguments._fields[:6]])
def test_tensors_of_another_kind(name: str, kind: str) -> None:
    """Under autocast, too, which looks at operands first."""
    make, message = KINDS[kind]
    value = make()
    if name == "labels":
        message = message.replace(FLOAT_DTYPES, "torch.int64 or torch.int32")
        message = message.removesuffix(": pass NAME.float()")
        value = value.long() if kind in ("sparse", "meta") else value
    if value is None and name in ("bias", "token_weight"):
        return
    if name == "temperature" and not isinstance(value, torch.Tensor):  # a number is expected
        return
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            said = complaint(linear_cross_entropy, **arguments(**{name: value}))
        assert said == f"{name} must {message}".replace("NAME", name)


ALL_OF_TWO = "for the tokens of all 2 ranks, got"
NOT_SPLIT = ": pass those of all ranks, since hidden alone is split"
BY_SEQUENCE = (
    ": pass hidden [B, S / P, H], split along dimension 1, and labels [B, S] with sequence_dim=1, "
    "since flattening would give tokens other labels"
)


@pytest.mark.parametrize(("hidden", "labels", "sequence_dim", "message"), [
    ((3,), (3,), 0, f"labels must be (6,) from hidden (3, 4) {ALL_OF_TWO} (3,){NOT_SPLIT}"),
    ((), (), 0, "hidden must be [T / P, ..., H] under sequence_parallel=True, got (4,)"),
    ((3, 4), (3, 8), 0,
     f"labels must be (6, 4) from hidden (3, 4, 4) {ALL_OF_TWO} (3, 8){BY_SEQUENCE}"),
    ((3, 4), (24,), 0,
     f"labels must be (6, 4) from hidden (3, 4, 4) {ALL_OF_TWO} (24,){BY_SEQUENCE}"),
    ((12,), (3, 8), 0,
     f"labels must be (24,) from hidden (12, 4) {ALL_OF_TWO} (3, 8){BY_SEQUENCE}"),
    ((3, 4), (3, 4), 1,
     f"labels must be (3, 8) from hidden (3, 4, 4) {ALL_OF_TWO} (3, 4){NOT_SPLIT}"),
    ((3, 4), (4, 6), 0,
     f"labels must be (6, 4) from hidden (3, 4, 4) {ALL_OF_TWO} (4, 6): pass labels.T"),
    ((3, 4), (8, 3), 1,
     f"labels must be (3, 8) from hidden (3, 4, 4) {ALL_OF_TWO} (8, 3): pass labels.T"),
    ((3, 1), (1, 6), 0,
     f"labels must be (6, 1) from hidden (3, 1, 4) {ALL_OF_TWO} (1, 6): pass "
     "labels.reshape((6, 1))"),
    ((3, 4), (9, 3), 1, f"labels must be (3, 8) from hidden (3, 4, 4) {ALL_OF_TWO} (9, 3)"),
    ((12,), (12,), 1, "hidden must be [B, S / P, ..., H] with sequence_dim=1 under "
     "sequence_parallel=True, got (12, 4)"),
])  # fmt: skip
def test_shapes_under_sequence_parallelism(
    hidden: tuple[int, ...], labels: tuple[int, ...], sequence_dim: int, message: str
) -> None:
    def rank(group: dist.ProcessGroup) -> str:
        given = arguments(hidden=torch.zeros(*hidden, H), labels=torch.zeros(labels).long())
        options: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": sequence_dim}
        return complaint(linear_cross_entropy, **given, tp_group=group, **options)

    assert run_ranks(rank, 2) == [message] * 2


def test_rows_of_two_ranks() -> None:
    def rank(group: dist.ProcessGroup) -> tuple[str, str]:
        start = (1, 11)[group.rank()]
        given = arguments(tp_group=group, vocab_size=23)
        return (
            complaint(linear_cross_entropy, **given, vocab_range=(start, start + V)),
            complaint(linear_cross_entropy, **given),
        )

    too_many = (
        "vocab_size must be within [1, 22], the rows of 2 shards of 11, got 23: tp_group must be "
        "all ranks that share the vocabulary, and uneven shards need vocab_range"
    )
    uncovered = "vocab_range of the 2 ranks must cover [0, 23), got {} on rank {}"
    assert run_ranks(rank, 2) == [
        (uncovered.format((1, 12), 0), too_many),
        (uncovered.format((11, 22), 1), too_many),
    ]


def test_rows_of_one_rank_without_a_group_are_said_to_be() -> None:
    def rank(group: dist.ProcessGroup) -> str:
        return complaint(linear_cross_entropy, **arguments(labels=torch.arange(8, 8 + T)))

    assert set(run_ranks(rank, 2)) == {
        "labels must be within [0, 11) or ignore_index -100, got 11 at token 3: if weight is one "
        "rank's rows, pass tp_group"
    }


def test_a_group_that_is_too_small_is_said_to_be() -> None:
    def rank(group: dist.ProcessGroup) -> str:
        labels = torch.arange(20, 20 + T)
        return complaint(linear_cross_entropy, **arguments(labels=labels, tp_group=group))

    assert set(run_ranks(rank, 2)) == {
        "labels must be within [0, 22) or ignore_index -100, got 22 at token 2: weight has 22 rows "
        "on the 2 ranks of tp_group together, which must be all ranks that share the vocabulary"
    }


@pytest.mark.parametrize(("hidden", "labels", "way_out"), [
    ((3,), (6,), "sequence_parallel=True"),
    ((3, 2), (3, 4), "sequence_parallel=True, sequence_dim=1"),
    ((3, 2), (6, 2), "sequence_parallel=True"),
    ((3,), (9,), ""),
])  # fmt: skip
def test_labels_of_all_ranks_need_sequence_parallel(
    hidden: tuple[int, ...], labels: tuple[int, ...], way_out: str
) -> None:
    def rank(group: dist.ProcessGroup) -> str:
        of_tokens = {"hidden": torch.zeros(*hidden, H), "labels": torch.zeros(labels).long()}
        return complaint(linear_cross_entropy, **arguments(**of_tokens, tp_group=group))

    expected = f"labels must be {hidden} from hidden {(*hidden, H)}, got {labels}"
    if way_out:
        expected += f": pass {way_out} if hidden is split over the 2 ranks of tp_group"
    assert run_ranks(rank, 2) == [expected] * 2
