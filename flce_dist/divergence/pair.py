"""The logits of student and teacher, a chunk of tokens at a time, and what compares them.

T = tokens of the tensor-parallel group, C = tokens of a chunk, V = real vocabulary rows here.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands, gathered_logits
from flce_dist.core.sections import Section
from flce_dist.kernels.divergence import formulas
from flce_dist.kernels.divergence.formulas import Measure, PairMetrics, PairStats
from flce_dist.kernels.divergence.interface import pair_kernels_of
from flce_dist.kernels.logits.operands import ShardLogits, new_window, rows_of
from flce_dist.kernels.rows.formulas import power_of_two
from flce_dist.parallel.collectives import TokenGather, gather_tokens, group_size


@dataclass(frozen=True)
class Teacher:
    """All that is known of the teacher except its tensors, as of a call without gradients."""

    call: Call = field(repr=False)  # has this rank's rows, in which ranks differ
    facts: str  # what must be equal on all ranks, as the next
    is_aligned: bool  # its real rows are those of the student's ids

    def check_aligned(self) -> None:
        """Check rows once ranks have compared what they know, so that all raise."""
        if not self.is_aligned:
            call = self.call
            start = call.vocab_start_index
            raise ValueError(
                "teacher_weight must have the rows of the same ids as weight on each rank, got "
                f"{call.V} from id {start} on: cut it by teacher_shard, once, or name its rows by "
                "teacher_vocab_range"
            )


class TeacherOperands(NamedTuple):
    """The teacher's tensors, for all tokens of the student's operands."""

    hidden: Tensor  # [T_all, H'] or [T_all / P, H']
    weight: Tensor  # [V and padding, H']
    bias: Tensor | None
    inverse_temperature: Tensor | None  # [T] in the dtype of its statistics, 1 where ignored

    def of_section(self, section: Section) -> "TeacherOperands":
        """Return the operands of a section's tokens."""
        inverse = self.inverse_temperature
        if not section.is_cut:
            return self
        return self._replace(
            hidden=self.hidden[section.rows],
            inverse_temperature=None if inverse is None else section.of_tokens(inverse),
        )

    def beside(self, student: Operands) -> Operands:
        hidden, weight, bias, inverse = self
        return student._replace(
            hidden=hidden, weight=weight, bias=bias, inverse_temperature=inverse, token_weight=None
        )


class Gathered(NamedTuple):
    """A model's logits of a section, and the gather of the hidden states that they are of."""

    gather: TokenGather
    logits: ShardLogits


class Pair:
    """One pass over both models' logits of a section, whose buffers the next chunk uses again.

    The model whose probabilities weigh differences comes first. Under sequence parallelism a gather
    of its hidden states, which begins at once, then one of the other's, in flight during the first
    GEMM. For each chunk a gather of 5 rows [C] from each rank; with jsd, tv or metrics another, of
    1 to 9 rows [C] fp64; with tp_invariant both, and one of 2 rows between them.
    """

    def __init__(
        self,
        section: Section,
        teacher: Call,
        teachers: TeacherOperands,
        measure: Measure,
        chunk_t: int,
        *,
        keeps_logits: bool,
        leader: Gathered | None = None,
        following: Section | None = None,
    ):
        """``teachers`` are of all tokens of the call that is cut into sections.

        ``keeps_logits`` tells whether the second model's logits are needed again, as for D.
        Once both models' hidden states are here, ahead of the GEMM that reads the second's, the
        first model's of ``following`` begin to travel: its pass takes ``upcoming`` as ``leader``.
        """
        call = section.call
        self.call = call
        self.measure = measure
        self.chunk_t = chunk_t
        self.kernels = pair_kernels_of(call.impl)
        self.dtype = call.stats_dtype
        self._section = section
        self._following = following
        self._teacher = teacher
        self._teachers = teachers
        self._leader = leader or self._begun_leader(section)
        self._follower: Gathered | None = None  # from when the leader's hidden states are here
        self.upcoming: Gathered | None = None  # the leader of the section that follows
        options = call.options
        self.has_second_pass = not measure.takes_one_pass or (
            options.with_metrics or options.tp_invariant
        )
        self._keeps_second = keeps_logits or self.has_second_pass
        self._buffers: list[Tensor] = []  # allocated once the pass begins
        self.stats: list[PairStats] = []
        self.metrics: list[PairMetrics] = []

    def take_statistics(self, tokens: tuple[int, int]) -> None:
        """Take statistics of the next tokens."""
        for first, last in ranges(*tokens, self.chunk_t):
            self._next_stats(first, last)

    def compare(self, tokens: tuple[int, int], in_d: Tensor, d: Tensor) -> Tensor | None:
        """Take them and write D, with the factors ``in_d`` [T], to d [N, V].

        In fp16 it is divided by the tokens' sizes [N], which are returned.
        """
        sizes = []
        for first, last in ranges(*tokens, self.chunk_t):
            stats = self._next_stats(first, last)
            part = d[first - tokens[0] : last - tokens[0]]
            sizes.append(self._write(first, last, stats, in_d, part))
        return _joined(sizes)

    def compute_again(
        self, tokens: tuple[int, int], stats: PairStats, in_d: Tensor, d: Tensor
    ) -> Tensor | None:
        """Write D to d, from statistics [T] that are known; return sizes as ``compare``."""
        sizes = []
        for first, last in ranges(*tokens, self.chunk_t):
            self._logits(first, last)
            part = d[first - tokens[0] : last - tokens[0]]
            sizes.append(self._write(first, last, stats.tokens(first, last), in_d, part))
        return _joined(sizes)

    @property
    def student(self) -> ShardLogits:
        """The student's logits, once the first chunk is computed."""
        return self._of_student.logits

    @property
    def gather(self) -> TokenGather:
        """The gather of the student's hidden states, once the first chunk is computed."""
        return self._of_student.gather

    @property
    def _of_student(self) -> Gathered:
        of_student = self._follower if self.measure.is_teacher_first else self._leader
        assert of_student is not None
        return of_student

    def _next_stats(self, first: int, last: int) -> PairStats:
        """Compute the logits of the next tokens; keep their statistics, and return them."""
        rows = self._logits(first, last)
        stats = self._compared(first, last, rows)
        self.stats.append(stats)
        return stats

    def _logits(self, first: int, last: int) -> Tensor:
        """Compute the logits of tokens; return what the passes yield of this shard, [5, C]."""
        if self._follower is None:
            self._follower = self._begun_follower()
        leader = self._leader.logits.tokens(first, last)
        follower = self._follower.logits.tokens(first, last)
        z, *others = (rows_of(buffer, 0, last - first) for buffer in self._buffers)
        out = others[0] if others else None
        rows = torch.zeros(5, last - first, dtype=self.dtype, device=z.device)
        self.kernels.pair_logits(leader, out=z, rows=rows[:2])
        self._follower.gather.wait()
        if self._following is not None and self.upcoming is None:
            self.upcoming = self._begun_leader(self._following)
        if self.measure.takes_one_pass:
            self.kernels.pair_logits(follower, out=out, rows=rows[2:], first=z, first_max=rows[0])
        else:
            self.kernels.pair_logits(follower, out=out, rows=rows[2:4])
        return rows

    def _models(self, section: Section) -> list[tuple[Call, Operands]]:
        """Return both models' calls and operands, the leader's first."""
        student = section.operands
        of_teacher = self._teachers.of_section(section).beside(student)
        models = [(section.call, student), (self._teacher, of_teacher)]
        return models[::-1] if self.measure.is_teacher_first else models

    def _begun_leader(self, section: Section) -> Gathered:
        """Start to gather the first model's hidden states."""
        first, _ = self._models(section)
        leader = Gathered(*gathered_logits(*first))
        leader.gather.start()
        return leader

    def _begun_follower(self) -> Gathered:
        """Wait for the first model's hidden states, start to gather the second's, and allocate."""
        gather, logits = self._leader
        gather.wait()  # the memory that ranks copy from holds one model's tokens at a time
        _, second = self._models(self._section)
        follower = Gathered(*gathered_logits(*second))
        follower.gather.start()
        n = min(self.chunk_t, max(1, logits.T))
        device = logits.labels.device
        for _ in range(1 + self._keeps_second):
            self._buffers.append(new_window(n, logits.V, self.dtype, device))
        return follower

    def _compared(self, first: int, last: int, rows: Tensor) -> PairStats:
        """Return statistics of tokens over all ranks; keep metrics if they are asked for."""
        measure = self.measure
        options = self.call.options
        stats = self.kernels.stats_of_totals(self._of_ranks(rows), measure, self.dtype)
        if not self.has_second_pass:
            return stats
        if options.tp_invariant:  # of the first pass only the maxima do not depend on shards
            totals = self._sums(first, last, stats, formulas.TOTALS, with_metrics=False)
            stats = formulas.with_totals(stats, totals.sum(0))
        sums = self._sums(first, last, stats, measure, with_metrics=options.with_metrics)
        n = measure.sums
        if options.with_metrics:
            best = n + formulas.METRIC_SUMS  # the first row of best ids
            of_shards = sums[:, n:best].sum(0)
            self.metrics.append(formulas.metrics_of(stats, of_shards, sums[:, best:]))
        if measure.takes_one_pass and not options.tp_invariant:  # metrics change no value
            return stats
        return formulas.stats_of_sums(stats, sums[:, :n].sum(0), measure)

    def _sums(
        self, first: int, last: int, stats: PairStats, measure: Measure, *, with_metrics: bool
    ) -> Tensor:
        """Return [P, k, C]: ``pair_sums`` of each rank."""
        s, t = self._stored(last - first)
        student = self.student.tokens(first, last)
        is_invariant = self.call.options.tp_invariant
        sums = self.kernels.pair_sums(
            s, t, student, stats, measure, with_metrics=with_metrics, is_invariant=is_invariant
        )
        return self._of_ranks(sums)

    def _write(
        self, first: int, last: int, stats: PairStats, in_d: Tensor, d: Tensor
    ) -> Tensor | None:
        s, t = self._stored(last - first)
        student = self.student.tokens(first, last)
        scale = in_d[first:last]
        size = None
        if self.call.is_fp16:
            # D and hidden times the size are both as far from fp16's least number as can be.
            largest = formulas.largest_probability(stats, self.measure) * scale.abs()
            size = power_of_two(largest.sqrt()).where(student.counted, 1.0)
            scale = scale / size
        self.kernels.pair_dlogits(s, t, student, stats, self.measure, scale, out=d)
        return size

    def _stored(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the logits of the chunk's n tokens, the student's and the teacher's."""
        of_first, of_second = (rows_of(buffer, 0, n) for buffer in self._buffers)
        if self.measure.is_teacher_first:
            return of_second, of_first
        return of_first, of_second

    def _of_ranks(self, rows: Tensor) -> Tensor:
        """Gather rows [k, C] of each rank, in rank order: [P, k, C]."""
        group = self.call.tp_group
        return gather_tokens(rows, group).view(group_size(group), *rows.shape)


def _joined(sizes: list[Tensor | None]) -> Tensor | None:
    """Return the sizes of all chunks, if they have any."""
    present = [size for size in sizes if size is not None]
    return torch.cat(present) if present else None


def ranges(start: int, end: int, step: int) -> list[tuple[int, int]]:
    """Cut tokens into ranges (first, last); of no tokens there is an empty one."""
    starts = list(range(start, end, step)) or [start]
    return list(zip(starts, [*starts[1:], end], strict=True))
