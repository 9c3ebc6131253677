"""The schedule of scores over each token's own ids, without a pass over the vocabulary.

T = tokens of the tensor-parallel group, V = real vocabulary rows here, H = hidden size, N ids.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.gradients import Gradients
from flce_dist.core.interface import Backward, Outputs, Results, Saved
from flce_dist.kernels.ids.token_ids import TokenIds, entries_by_id
from flce_dist.kernels.logits.operands import rows_of
from flce_dist.parallel import collectives, transport
from flce_dist.scores.named import NamedSaved, begun_pass, scored


@dataclass(frozen=True)
class OverIds:
    """The first output is logprob, as ids; metrics and ``Upstream`` are lse, other, entropy [T].

    There are gathered dot products; each rank computes those of its own rows.
    Forward: under sequence parallelism a gather of hidden; an all-reduce SUM of logits [N].
    Backward: under sequence parallelism a gather of hidden, if weight needs a gradient, in flight
    while dhidden is computed; then the sum of dhidden over ranks, in flight during dweight.
    """

    keeps_operands: ClassVar[bool] = True
    skips_ignored: ClassVar[bool] = True

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
        forward_pass, ids = begun_pass(call, operands)
        forward_pass.gather.wait()
        z = call.kernels.logits_at_ids(
            forward_pass.logits, ids.ids, ids.token, vocab_size=call.vocab_size
        )
        z = collectives.all_reduce_sum(z, call.tp_group)
        return scored(call, operands, z, ids, None)

    def backward(self, request: Backward) -> Results:
        call = request.call
        operands = request.operands
        assert operands is not None and operands.offsets is not None
        named = NamedSaved(*request.saved)
        ids = named.with_offsets(operands.offsets)
        dlogprob, dlse, _, dentropy = request.upstream
        factor, _ = call.kernels.set_gradient(
            named.z,
            ids,
            named.logprob,
            named.entropy,
            (dlogprob, dlse, dentropy),
            operands.inverse_temperature,
            softcap=call.options.softcap,
            logit_scale=call.options.logit_scale,
        )
        return _gradients(request, ids, factor)


def _gradients(request: Backward, ids: TokenIds, factor: Tensor) -> Results:
    """Return the gradients from those of each entry's product ``h . w``, factor [N]."""
    call = request.call
    operands = request.operands
    assert operands is not None
    kernels = call.kernels
    start = call.vocab_start_index
    gather = None
    if call.needs.weight:
        gather = transport.gather(operands.hidden, call.sequence_group)
        gather.start()
    gradients = Gradients(call, operands, request.accumulator)
    if gradients.dhidden is not None:
        total = gradients.dhidden.sum
        total.acquire()
        kernels.dhidden_of_ids(
            factor,
            ids,
            rows_of(operands.weight, 0, call.V),
            vocab_start_index=start,
            out=total.tokens,
        )
        total.start()
    if not (call.needs.weight or call.needs.bias):
        return gradients.finished()
    entries = entries_by_id(ids, factor)
    hidden = None if gather is None else gather.wait()  # even if nothing reads it
    if gradients.dweight is not None and hidden is not None:
        out = rows_of(gradients.dweight, 0, call.V)
        adds = gradients.accumulates
        if not adds:
            out.zero_()
        kernels.dweight_of_ids(entries, hidden, vocab_start_index=start, out=out, adds=adds)
    if gradients.dbias is not None:
        ones = factor.new_full((1, 1), 1 / call.options.logit_scale).expand(call.T, 1)
        dbias = gradients.dbias[: call.V, None]
        kernels.dweight_of_ids(entries, ones, vocab_start_index=start, out=dbias, adds=False)
    return gradients.finished()
