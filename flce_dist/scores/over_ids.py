"""Scores over each token's own ids: no pass over the vocabulary.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size, N = ids of
all tokens.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.scores.token_ids import TokenIds, set_gradient, sorted_ids
from flce_dist.op.call import (
    Accumulator,
    Call,
    Operands,
    Outputs,
    Results,
    Saved,
    Schedule,
    Upstream,
)
from flce_dist.op.gradients import Gradients
from flce_dist.op.statistics import shard_logits
from flce_dist.parallel import collectives, transport
from flce_dist.parallel.token_order import TokenOrder


class OverIdsSaved(NamedTuple):
    z: Tensor  # [N], of all ranks
    logprob: Tensor  # [N], in the caller's order
    entropy: Tensor | None  # [T]
    ids: Tensor  # as in TokenIds, as the others
    token: Tensor
    first: Tensor
    place: Tensor


@dataclass(frozen=True)
class OverIds:
    """Gathered dot products; each rank those of its own rows.

    Forward: under sequence parallelism a gather of hidden; an all-reduce SUM of logits [N].
    Backward: under sequence parallelism a gather of hidden, if weight needs a gradient, in flight
    while dhidden is computed; then the sum of dhidden over ranks, in flight during dweight.
    """

    with_entropy: bool
    T: int = 0

    keeps_operands: ClassVar[bool] = True

    def planned(self, loss: Schedule, order: TokenOrder) -> tuple[Schedule, TokenOrder]:
        T = order.pieces[-1][1]
        return replace(self, T=T), replace(order, pieces=((0, T),))

    def chunks(self) -> list[tuple[int, int]]:
        return [(0, self.T)]

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        assert operands.offsets is not None
        gather = transport.gather(operands.hidden, call.order, call.sequence_group)
        gather.start_all()
        ids = sorted_ids(operands.labels, operands.offsets, call.vocab_size)
        logits = shard_logits(call, operands, gather.wait_all())
        kernels = call.kernels
        z = kernels.logits_at_ids(logits, ids)
        z = collectives.all_reduce_sum(z, call.tp_group)
        logprob, lse, _, entropy = kernels.set_scores(z, ids, None, with_entropy=self.with_entropy)
        # Copies: the caller may change what is returned.
        copy = None if entropy is None else entropy.clone()
        saved = OverIdsSaved(z, logprob.clone(), copy, ids.ids, ids.token, ids.first, ids.place)
        return logprob, (lse, None, entropy), saved

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        raise NotImplementedError("scores are not supported under torch.compile")

    def backward(
        self,
        call: Call,
        operands: Operands | None,
        saved: Saved,
        upstream: Upstream,
        accumulator: Accumulator | None,
        *,
        is_last: bool,
    ) -> Results:
        assert operands is not None and operands.offsets is not None
        z, logprob, entropy, sorted, *others = OverIdsSaved(*saved)
        ids = TokenIds(sorted, operands.offsets, *others)
        kernels, options, start = call.kernels, call.options, call.vocab_start_index
        factor, _ = set_gradient(
            z, ids, logprob, entropy, (upstream.loss, upstream.lse, upstream.entropy),
            operands.inverse_temperature, softcap=options.softcap, logit_scale=options.logit_scale,
        )  # fmt: skip
        gather = None
        if call.needs.weight:
            gather = transport.gather(operands.hidden, call.order, call.sequence_group)
            gather.start_all()
        gradients = Gradients(call, operands, accumulator)
        if gradients.dhidden is not None:
            gradients.dhidden.acquire()
            kernels.dhidden_of_ids(
                factor, ids, operands.weight[: call.V],
                vocab_start_index=start, out=gradients.dhidden.tokens,
            )  # fmt: skip
            gradients.dhidden.start(0, call.T)
        order = torch.argsort(ids.ids, stable=True)
        if gradients.dweight is not None and gather is not None:
            out, adds = gradients.dweight[: call.V], gradients.accumulates
            if not adds:
                out.zero_()
            kernels.dweight_of_ids(
                factor, ids, gather.wait_all(), order, vocab_start_index=start, out=out, adds=adds
            )
        if gradients.dbias is not None:
            one = factor.new_full((1, 1), 1 / options.logit_scale).expand(call.T, 1)
            dbias = gradients.dbias[: call.V, None]
            kernels.dweight_of_ids(
                factor, ids, one, order, vocab_start_index=start, out=dbias, adds=False
            )
        return gradients.finished()
