"""Named ids, from sorted entries to their scores, and what backward needs of them.

T = tokens of the tensor-parallel group, N = ids of all of them.
"""

from typing import NamedTuple

from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.interface import Outputs
from flce_dist.core.statistics import Pass
from flce_dist.kernels.ids.token_ids import TokenIds
from flce_dist.kernels.rows.formulas import TokenStats


class NamedSaved(NamedTuple):
    z: Tensor  # [N], of all ranks; of a repeated id with its first entry
    logprob: Tensor  # [N], in the caller's order
    entropy: Tensor | None  # [T]
    ids: Tensor  # as in TokenIds, as the others
    token: Tensor
    place: Tensor

    def with_offsets(self, offsets: Tensor) -> TokenIds:
        return TokenIds(self.ids, offsets, self.token, self.place)


def begun_pass(call: Call, operands: Operands) -> tuple[Pass, TokenIds]:
    """Return a pass that gathers hidden, and the ids, which are sorted meanwhile."""
    assert operands.offsets is not None
    forward_pass = Pass(call, operands)
    forward_pass.gather.start()
    ids = call.kernels.sorted_ids(operands.labels, operands.offsets, call.vocab_size)
    return forward_pass, ids


def scored(
    call: Call, operands: Operands, z: Tensor, ids: TokenIds, unnamed: TokenStats | None
) -> tuple[Tensor, Outputs, NamedSaved]:
    """Return logprob as ids, (lse, other, entropy) [T], and what backward needs of named ids.

    z is [N], of all ranks; ``unnamed`` are the statistics of the ids that are not named, if any are
    summed. What is saved are copies: the caller may change what is returned.
    """
    logprob, lse, other, entropy = call.kernels.set_scores(
        z, ids, unnamed, vocab_size=call.vocab_size, with_entropy=call.options.with_metrics
    )
    copy = None if entropy is None else entropy.clone()
    saved = NamedSaved(z, logprob, copy, ids.ids, ids.token, ids.place)
    return logprob.view(operands.labels.shape).clone(), (lse, other, entropy), saved
