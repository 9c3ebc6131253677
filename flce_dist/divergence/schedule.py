"""The schedules of a divergence.  T = tokens of the group, V = real vocabulary rows here.

Logits of a chunk of tokens are held twice, in the dtype of statistics, until both models' sums over
the vocabulary are known. They become D, the gradients by the student's logits in the operands'
dtype; a group of chunks holds its D until two GEMMs have added it to dhidden and dweight.
Collectives of the logits are those of ``Pair``, those of gradients the sum of dhidden over ranks,
in flight during the last dweight. Under sequence parallelism groups are sections.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands, gathered_logits
from flce_dist.core.dlogits import Chunk
from flce_dist.core.gradients import Gradients, new_dweight
from flce_dist.core.interface import Accumulator, Backward, Outputs, Results, Saved
from flce_dist.core.sections import (
    Section,
    in_order_of_sections,
    sections_of,
    whole,
    with_next,
)
from flce_dist.core.statistics import early_norm
from flce_dist.divergence.pair import Gathered, Pair, Teacher, TeacherOperands, ranges
from flce_dist.divergence.taken import Taken
from flce_dist.kernels.divergence.formulas import Measure, PairStats
from flce_dist.kernels.logits.operands import ColumnCache, new_window
from flce_dist.kernels.rows.formulas import RowGradient, root_of_large, token_dloss
from flce_dist.parallel.counted import at_places, put_back
from flce_dist.schedules.saved_gradients import (
    SavedGradients,
    factors_of_forward,
    times_upstream,
)
from flce_dist.schedules.windows import closed


@dataclass(frozen=True)
class Divergence:
    """Two GEMMs of 2 T H V flop, and no gradients."""

    measure: Measure
    teacher: Teacher
    T: int
    chunk_t: int  # tokens whose logits are held
    group_t: int  # of whole chunks, whose D is held
    dweight_dtype: torch.dtype  # in which several groups add up

    keeps_operands: ClassVar[bool] = False
    skips_ignored: ClassVar[bool] = True

    def forward(
        self, call: Call, operands: Operands, teacher: TeacherOperands
    ) -> tuple[Tensor, Outputs, Saved]:
        taken = self.statistics(call, operands, teacher)
        return *_results(taken, operands, early_norm(call, operands)), ()

    def backward(self, request: Backward) -> Results:
        raise NotImplementedError("a call without gradients has no backward")

    def sections(self, call: Call, operands: Operands) -> list[Section]:
        """Return groups of chunks as sections of a call whose hidden is split."""
        return sections_of(call, operands, (self.group_t,))

    def pair(
        self,
        section: Section,
        teacher: TeacherOperands,
        *,
        keeps_logits: bool,
        leader: Gathered | None = None,
        following: Section | None = None,
    ) -> Pair:
        """Begin a pass over both models' logits of a section."""
        return Pair(
            section,
            self.teacher.call,
            teacher,
            self.measure,
            self.chunk_t,
            keeps_logits=keeps_logits,
            leader=leader,
            following=following,
        )

    def statistics(self, call: Call, operands: Operands, teacher: TeacherOperands) -> Taken:
        """Take the statistics of all tokens, and keep no logits.

        A section's first hidden states travel during the second GEMM of the one before.
        """
        taken = Taken(call, self.sections(call, operands))
        leader = None
        for section, following in with_next(taken.sections):
            pair = self.pair(
                section, teacher, keeps_logits=False, leader=leader, following=following
            )
            pair.take_statistics((0, section.call.T))
            taken.add(pair)
            leader = pair.upcoming
        return taken

    def add_groups(
        self,
        taken: Taken,
        teacher: TeacherOperands,
        gradients: Gradients,
        in_d: Tensor,
        scale: Tensor | None,
        stats: PairStats | None = None,
    ) -> None:
        """Add the gradients of all groups, from statistics that are taken now or are known.

        ``in_d`` and ``scale`` [T] are of tokens in order, ``stats`` as ``Taken`` has them.
        """
        in_d = in_order_of_sections(in_d, taken.sections)
        scale = None if scale is None else in_order_of_sections(scale, taken.sections)
        done = 0  # tokens of earlier sections
        pair = self.pair(taken.sections[0], teacher, keeps_logits=True)
        for section, following in with_next(taken.sections):
            T = section.call.T
            of_section = slice(done, done + T)
            in_d_of_section = in_d[of_section]
            scale_of_section = None if scale is None else scale[of_section]
            stats_of_section = None if stats is None else stats.tokens(done, done + T)
            for tokens in ranges(0, T, self.group_t):
                chunk = _group(pair, tokens, in_d_of_section, scale_of_section, stats_of_section)
                if tokens[1] == T:
                    taken.add(pair)
                    del pair  # its logits, and the teacher's hidden states
                    if following is not None:
                        pair = self.pair(following, teacher, keeps_logits=True)
                gradients.add(chunk, section)
                del chunk  # freed before the next is allocated
            done += T


class DivergenceInForward(Divergence):
    """Forward makes the gradients: four GEMMs. Backward multiplies them by a scalar."""

    def forward(
        self, call: Call, operands: Operands, teacher: TeacherOperands
    ) -> tuple[Tensor, Outputs, Saved]:
        norm = early_norm(call, operands)
        weights, norm_in_d, norm_in_backward = factors_of_forward(call, operands, norm)
        taken = Taken(call, self.sections(call, operands))
        accumulator = None
        if call.needs.weight:
            accumulator = new_dweight(operands.weight, self.dweight_dtype)
        gradients = Gradients(call, operands, accumulator, precedes=True, sections=taken.sections)
        in_d, scale = _factors(call, operands._replace(token_weight=weights), norm_in_d, None)
        self.add_groups(taken, teacher, gradients, in_d, scale)
        results = _results(taken, operands, norm)
        dhidden, dweight, dbias = gradients.finished(rounds_dbias=False)
        if dweight is not None and not call.is_fp16:
            dweight = dweight.to(call.dtype)
        return *results, SavedGradients(norm_in_backward, dhidden, dweight, dbias, None)

    def backward(self, request: Backward) -> Results:
        return times_upstream(request)


class DivergenceCached(Divergence):
    """Forward keeps D of each token's value, [T, V]: two GEMMs, and two in backward.

    In fp16 backward multiplies D by the root of a large scale, in place if it is the last one.
    """

    keeps_operands: ClassVar[bool] = True

    def forward(
        self, call: Call, operands: Operands, teacher: TeacherOperands
    ) -> tuple[Tensor, Outputs, Saved]:
        taken = Taken(call, [whole(call, operands)])
        pair = self.pair(taken.sections[0], teacher, keeps_logits=True)
        tokens = (0, self.T)
        d = _new_d(call, tokens, operands.labels.device)
        size = pair.compare(tokens, _tempered_scale(call, operands), d)
        taken.add(pair)
        norm = early_norm(call, operands)
        return *_results(taken, operands, norm), (norm, d, size)

    def backward(self, request: Backward) -> Results:
        call = request.call
        operands = request.operands
        norm, d, size = request.saved
        assert operands is not None
        scale = _token_factor(call, operands, norm, request.upstream.loss)
        if call.is_fp16 and call.needs.weight:
            root = root_of_large(scale)
            scale = scale / root
            out = d if request.is_last else _new_d(call, (0, self.T), d.device)
            labels = operands.labels
            ignore_index = call.options.ignore_index
            call.kernels.scale_rows(d, root, labels, ignore_index=ignore_index, out=out)
            d = out
        chunk = _chunk((0, self.T), operands.labels, d, scale, size, operands.n_counted)
        if call.needs.weight:
            gather, logits = gathered_logits(call, operands)
            gather.start()
            chunk = chunk._replace(gather=gather, logits=logits)
        gradients = Gradients(call, operands, request.accumulator)
        gradients.add(chunk)
        return closed(gradients, chunk)


class DivergenceRecomputed(Divergence):
    """Forward keeps statistics of tokens: two GEMMs, and four in backward."""

    keeps_operands: ClassVar[bool] = True

    def forward(
        self, call: Call, operands: Operands, teacher: TeacherOperands
    ) -> tuple[Tensor, Outputs, Saved]:
        norm = early_norm(call, operands)
        taken = self.statistics(call, operands, teacher)
        return *_results(taken, operands, norm), (norm, *taken.all_stats(), *teacher)

    def backward(self, request: Backward) -> Results:
        call = request.call
        operands = request.operands
        norm, *saved = request.saved
        n = len(PairStats._fields)
        stats = PairStats(*saved[:n])
        teacher = TeacherOperands(*saved[n:])
        assert operands is not None
        taken = Taken(call, self.sections(call, operands))
        accumulator = self._accumulator(request)
        gradients = Gradients(call, operands, accumulator, sections=taken.sections)
        in_d, scale = _factors(call, operands, norm, request.upstream.loss)
        self.add_groups(taken, teacher, gradients, in_d, scale, stats)
        dhidden, dweight, dbias = gradients.finished()
        if dweight is not None and accumulator is not request.accumulator:
            assert request.accumulator is not None
            out, adds = request.accumulator
            dweight = out.add_(dweight) if adds else out.copy_(dweight)
        return dhidden, dweight, dbias

    def _accumulator(self, request: Backward) -> Accumulator | None:
        """Return the caller's, or a wider one where several groups would be rounded in it."""
        accumulator = request.accumulator
        if accumulator is None or self.T <= self.group_t:
            return accumulator
        dtype = torch.promote_types(accumulator.out.dtype, self.dweight_dtype)
        if dtype == accumulator.out.dtype:
            return accumulator
        return new_dweight(accumulator.out, dtype)


def _group(
    pair: Pair,
    tokens: tuple[int, int],
    in_d: Tensor,
    scale: Tensor | None,
    stats: PairStats | None,
) -> Chunk:
    """Return the D of tokens of a section, made now with their statistics, or from known ones."""
    d = _new_d(pair.call, tokens, in_d.device)
    if stats is None:
        size = pair.compare(tokens, in_d, d)
    else:
        size = pair.compute_again(tokens, stats, in_d, d)
    factor = None if scale is None else scale[slice(*tokens)]
    logits = pair.student.tokens(*tokens)
    chunk = _chunk(tokens, logits.labels, d, factor, size, logits.n_counted)
    return chunk._replace(gather=pair.gather, logits=logits)


def _chunk(
    tokens: tuple[int, int],
    labels: Tensor,
    d: Tensor,
    scale: Tensor | None,
    size: Tensor | None,
    n_counted: Tensor | None,
) -> Chunk:
    """Return what ``Gradients`` adds without hidden: D [N, V], and factors [N] that it lacks."""
    unused = d.new_empty(len(d))  # since D is not made of it
    if scale is not None and size is not None:
        scale = scale * size
    return Chunk(
        tokens=tokens,
        labels=labels,
        rows=RowGradient(scale, unused, unused, (), None),
        cache=ColumnCache((d,)),
        cached_reference=None,
        gather=None,
        logits=None,
        window_v=max(1, d.shape[1]),
        n_counted=n_counted,
    )


def _new_d(call: Call, tokens: tuple[int, int], device: torch.device) -> Tensor:
    return new_window(tokens[1] - tokens[0], call.V, call.dtype, device)


def _results(taken: Taken, operands: Operands, norm: Tensor | None) -> tuple[Tensor, Outputs]:
    """Return the loss, and metrics if asked for, in the caller's order."""
    call = taken.call
    options = call.options
    places = operands.places
    counted = operands.labels != options.ignore_index
    loss = taken.values()
    if operands.token_weight is not None:
        loss = loss * operands.token_weight
    loss = loss.where(counted, 0.0)
    if options.reduction == "none":
        loss = put_back(loss, places, call.T_all)
    else:
        loss = call.kernels.reduce_loss(loss, norm)
    metrics = (x.masked_fill_(~counted, 0) for x in taken.metrics())
    return loss, tuple(put_back(x, places, call.T_all) for x in metrics)


def _tempered_scale(call: Call, operands: Operands) -> Tensor:
    """Return the factor [T] of products ``h . w`` in tempered logits, but for the softcap."""
    scale = torch.full_like(operands.labels, call.options.logit_scale, dtype=call.stats_dtype)
    inverse = operands.inverse_temperature
    return scale if inverse is None else scale * inverse


def _token_factor(
    call: Call, operands: Operands, norm: Tensor | None, dloss: Tensor | None
) -> Tensor:
    """Return the gradient [T] by each token's value."""
    if dloss is not None and dloss.dim():
        dloss = at_places(dloss, operands.places)
    like = torch.empty(call.T, dtype=call.stats_dtype, device=operands.labels.device)
    labels = operands.labels
    token_weight = operands.token_weight
    return token_dloss(like, labels, token_weight, norm, dloss, call.loss_terms)


def _factors(
    call: Call, operands: Operands, norm: Tensor | None, dloss: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what D contains, and what it does not: in fp16 small factors would become 0.

    Of large ones D contains the square of ``root_of_large``, and the token's size the root of that.
    """
    tempered_scale = _tempered_scale(call, operands)
    scale = _token_factor(call, operands, norm, dloss)
    if not call.is_fp16:
        return tempered_scale * scale, None
    large = root_of_large(scale).square()
    return tempered_scale * large, scale / large
