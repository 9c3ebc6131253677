"""Sections of a sequence-parallel call: the same rows of every rank's tokens.

The hidden states of one section travel while another is computed, and gathered tokens take the
memory of a section or two, however many tokens there are. A section has its tokens in rank order,
so whatever is of tokens [T] is cut and joined here.

T = tokens of the tensor-parallel group, P = ranks, n = rows of each rank in a section.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.parallel import collectives


class Section(NamedTuple):
    """A call of P n tokens, or all of a call that is not cut."""

    call: Call
    operands: Operands
    rows: slice  # of this rank's hidden states, and of each part of tokens [T]
    parts: int  # one of each rank, so P; 1 if the call is not cut

    @property
    def is_cut(self) -> bool:
        """Whether the call has other sections, too."""
        return self.parts > 1

    @property
    def is_later(self) -> bool:
        """Whether another section is computed while this one travels."""
        return self.rows.start > 0

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return this section's [P n] of x [T]."""
        return _cut(x, self.rows, self.parts)


def whole(call: Call, operands: Operands) -> Section:
    """Return all of a call as one section."""
    return Section(call, operands, slice(0, len(operands.hidden)), 1)


def sections_of(call: Call, operands: Operands, most: Sequence[int]) -> list[Section]:
    """Cut a call whose hidden is split into the sections of ``rows_of_sections``.

    Tokens that are chosen may lie anywhere, so such a call is not cut.
    """
    P = collectives.group_size(call.sequence_group)
    rows = rows_of_sections(call.T, P, most)
    if P == 1 or len(rows) == 1 or operands.places is not None:
        return [whole(call, operands)]
    return [_section(call, operands, slice(*range_of_rows), P) for range_of_rows in rows]


def tokens_here(call: Call, x: Tensor) -> Tensor:
    """Return those of [T_all] tokens that this rank's hidden has: its part if that is split."""
    P = collectives.group_size(call.sequence_group)
    rank = collectives.group_rank(call.sequence_group)
    return x.view(P, call.T_all // P)[rank] if P > 1 else x


def rows_of_sections(T: int, P: int, most: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rows (first, last) of each rank in sections of at most so many tokens.

    The last number of ``most`` holds for all further sections, too. A row of each rank is taken
    even where P tokens are more.
    """
    rows = T // P
    starts = [0]
    for tokens in most[:-1]:
        starts.append(starts[-1] + max(1, tokens // P))
    starts.extend(range(starts[-1] + max(1, most[-1] // P), rows, max(1, most[-1] // P)))
    starts = [start for start in starts if start < rows] or [0]
    return list(zip(starts, [*starts[1:], rows], strict=True))


def with_next(sections: Sequence[Section]) -> Iterator[tuple[Section, Section | None]]:
    """Yield each section and the one behind it, whose hidden states travel meanwhile."""
    return zip(sections, [*sections[1:], None], strict=True)


def joined(of_sections: Sequence[Tensor], parts: int) -> Tensor:
    """Return [T, ...] in the order of tokens from what belongs to each section; always a copy.

    ``parts`` is that of the sections; if it is 1 the tensors simply follow one another.
    """
    if parts == 1:
        return torch.cat(list(of_sections))
    by_part = [x.view(parts, len(x) // parts, *x.shape[1:]) for x in of_sections]
    return torch.cat(by_part, 1).flatten(0, 1)


def in_order_of_sections(x: Tensor, sections: Sequence[Section]) -> Tensor:
    """Return [T] of tokens x [T] as the sections have them, one after the other."""
    if len(sections) == 1:
        return x
    return torch.cat([section.of_tokens(x) for section in sections])


def _section(call: Call, operands: Operands, rows: slice, P: int) -> Section:
    T = P * (rows.stop - rows.start)
    token_weight = operands.token_weight
    inverse = operands.inverse_temperature
    of_section = operands._replace(
        hidden=operands.hidden[rows],
        labels=_cut(operands.labels, rows, P),
        token_weight=None if token_weight is None else _cut(token_weight, rows, P),
        inverse_temperature=None if inverse is None else _cut(inverse, rows, P),
    )
    return Section(replace(call, T=T, T_all=T), of_section, rows, P)


def _cut(x: Tensor, rows: slice, parts: int) -> Tensor:
    if parts == 1:
        return x
    of_parts = x.view(parts, len(x) // parts)[:, rows]
    return of_parts.reshape(-1).contiguous()  # of one row it is a view
