"""What a schedule is: its protocol, what it gets beside a call, and what it returns.

T = tokens on the tensor-parallel group (with max_counted those that are computed, of T_all),
V = real vocabulary rows here, H = hidden size, P = ranks.
"""

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from flce_dist.arguments.options import UnsizedSchedule
from flce_dist.core.call import Call, Operands, Upstream

Results = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dhidden [T_all, H] (under sequence parallelism [T_all / P, H]), dweight [V, H] and dbias [V].

dweight is [V, r] where the last r columns of weight alone are trained.
"""

Outputs = tuple[Tensor | None, ...]
"""``Metrics`` and, behind them, scalars of the schedule's own."""

Saved = tuple[Any, ...]
"""What backward needs from forward besides the operands: tensors or None, by each schedule."""


class Accumulator(NamedTuple):
    """Where dweight is written: ``out``, as ``Operands.trained``, is added to or overwritten."""

    out: Tensor
    adds: bool


class Backward(NamedTuple):
    """What a schedule's ``backward`` gets."""

    call: Call
    operands: Operands | None  # None unless the schedule keeps them
    saved: Saved
    upstream: Upstream  # not all None
    accumulator: Accumulator | None  # of dweight, if it is needed and operands are kept
    is_last: bool  # whether what was saved may be overwritten


class Metrics(NamedTuple):
    """What one pass over the logits yields besides the loss; None if not asked for."""

    lse: Tensor | None = None  # [T_all] for the caller, as the next three
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    correct: Tensor | None = None


class LossWithMetrics(NamedTuple):
    """The loss, and metrics of each token (labels' shape) from the same pass over the logits.

    Values are the same on every rank of the tensor-parallel group; 0 and False for ignored tokens.
    Where a bias of -inf bans all ids lse is -inf, and loss, logprob and entropy are NaN.
    """

    loss: Tensor  # fp32 (fp64 for fp64 inputs), scalar or labels' shape by reduction
    lse: Tensor  # log-sum-exp of the logits, fp32, differentiable
    logprob: Tensor  # log-probability of the label, fp32, differentiable
    entropy: Tensor  # of the predicted distribution in nats, fp32, differentiable
    correct: Tensor  # bool: no logit is larger than the label's


class Schedule(Protocol):
    """One way to get the probabilities that backward needs.

    A schedule is a frozen dataclass whose fields are its sizes, planned from facts that all ranks
    share. It holds no tensors: it is cached, and compared between ranks by its repr.
    """

    keeps_operands: ClassVar[bool]
    """Whether backward needs the operands again; they are then saved with the rest."""
    skips_ignored: ClassVar[bool]
    """Whether it leaves out tokens behind those that count, as ``skip_ignored`` asks."""

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        """Return the loss, the metrics in the caller's order, and what backward needs."""

    def backward(self, request: Backward) -> Results:
        """Return the gradients that the call needs."""


@runtime_checkable
class Compilable(Schedule, Protocol):
    """A schedule of the loss, which compiled code may take, too."""

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        """Return uninitialised tensors of the shapes and dtypes that ``forward`` saves."""


_registered: dict[str, UnsizedSchedule] = {}


def registered(schedule: UnsizedSchedule) -> UnsizedSchedule:
    """Let operators of compiled code, which take no objects, find the schedule by its name.

    Return it, or an equal one that was registered before.
    """
    return _registered.setdefault(schedule.name, schedule)


def schedule_named(name: str) -> UnsizedSchedule | None:
    return _registered.get(name)
