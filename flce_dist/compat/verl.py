"""verl 0.9's fused ``linear_cross_entropy``: log-probabilities and entropy of each token."""

import sys

import torch.distributed as dist
from torch import Tensor

from flce_dist.api import linear_cross_entropy_with_metrics
from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS, LABELS, check_group, check_tensor
from flce_dist.arguments.options import Reduction
from flce_dist.arguments.rank_check import refusals_told
from flce_dist.compat.stand_ins import StandIns

_FUNCTION = "linear_cross_entropy_with_metrics"

_stand_ins = StandIns()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: Reduction = "none",
    dist_process_group: dist.ProcessGroup | None = None,
    *,
    sequence_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return ``(logprobs, entropy)`` of all tokens, fp32 and flat, both differentiable.

    Args:
        hidden: [..., H], the same on every rank; [S, B, H] of labels [B, S] if ``sequence_first``.
        weight: [V, H], this rank's rows of the vocabulary.
        labels: hidden's shape without H, or flat; global ids. -100 is ignored, with results 0.
        temperature: of all tokens, or labels' shape.
        reduction: of logprobs alone.
        dist_process_group: ranks that share the vocabulary, over which the caller sums dhidden.

    Raises:
        ValueError: shapes do not belong together, or an argument is wrong, as for ours.
    """
    check_group(dist_process_group, sequence_parallel=False, name="dist_process_group")
    with refusals_told(_FUNCTION, dist_process_group, hidden):
        values.flag("sequence_first", sequence_first)
        hidden, labels, temperature = _flat(hidden, labels, temperature, sequence_first)
    out = linear_cross_entropy_with_metrics(
        hidden,
        weight,
        labels,
        temperature=temperature,
        reduction=reduction,
        tp_group=dist_process_group,
        reduce_dhidden=False,
    )
    return -out.loss, out.entropy


def _flat(
    hidden: Tensor, labels: Tensor, temperature: float | Tensor, sequence_first: bool
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Return hidden [T, H], labels [T] and a temperature of all tokens, or [T], in one order."""
    check_tensor("hidden", hidden, FLOATS)
    check_tensor("labels", labels, LABELS, hidden)
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature, FLOATS, hidden)
    if sequence_first:
        if hidden.dim() < 3:
            raise ValueError(
                f"hidden must be [S, B, H] with sequence_first=True, got {tuple(hidden.shape)}"
            )
        hidden = hidden.transpose(0, 1)
    expected = hidden.shape[:-1]
    # Without ones: a batch of one sequence has its tokens in order anyway.
    expected_sizes, sizes = ([n for n in shape if n != 1] for shape in (expected, labels.shape))
    if sizes not in (expected_sizes, [expected.numel()]):
        raise ValueError(
            f"labels must be {tuple(expected)} from hidden, or flat, got {tuple(labels.shape)}: "
            "hidden [S, B, H] with labels [B, S] needs sequence_first=True"
        )
    if isinstance(temperature, Tensor):
        of_tokens = [n for n in temperature.shape if n != 1]
        if of_tokens not in (sizes, expected_sizes, [labels.numel()]):
            raise ValueError(
                f"temperature must be a float, {tuple(labels.shape)} from labels, or flat, got "
                f"{tuple(temperature.shape)}"
            )
        temperature = temperature.reshape(-1)
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), temperature


def use_linear_cross_entropy() -> None:
    """Replace the function in verl's module, and where verl has imported it already."""
    from verl.utils.kernel import linear_cross_entropy as module

    theirs = module.linear_cross_entropy
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__dict__", {}).get("linear_cross_entropy") is theirs:
            _stand_ins.put(loaded, "linear_cross_entropy", linear_cross_entropy)


def restore() -> None:
    """Undo ``use_linear_cross_entropy``, where it was called."""
    _stand_ins.restore()
