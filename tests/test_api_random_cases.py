"""Random shapes, strides, dtypes, options and ranks: the op agrees with the reference.

Windows and chunks are of a few columns and tokens, new memory holds NaN, and so do the gaps between
strided elements; the hidden states of ignored tokens hold infinities, too. test_backward.py has
some cases by name.
"""

from hypothesis import given, settings

from tests.parallel_problem import small_chunks
from tests.problems import poisoned_memory
from tests.random_cases import SETTINGS, calls, check_on_ranks


@settings(max_examples=100, **SETTINGS)
@given(calls())
def test_eager_on_any_ranks(drawn):
    with small_chunks(), poisoned_memory():
        check_on_ranks(drawn)


@settings(max_examples=25, **SETTINGS)
@given(calls(max_P=1, sizes=16))
def test_triton_on_one_rank(drawn):
    with small_chunks(), poisoned_memory():
        check_on_ranks(drawn, "triton")
