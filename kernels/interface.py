"""The kernel interface: what ``gpu.py`` and ``eager.py`` both offer, with the same signatures."""

from typing import Any

from flce_dist.kernels import eager


class Kernels:
    """The passes over logits, [T, N] and [T] that every schedule is made of, for type checkers.

    ``kernels_of`` returns a module with these names. The docstrings are those of the Triton
    functions; tests/test_kernel.py compares the signatures.
    """

    may_replay = staticmethod(eager.may_replay)
    counted_tokens = staticmethod(eager.counted_tokens)
    label_logit = staticmethod(eager.label_logit)
    new_sums = staticmethod(eager.new_sums)
    linear_stats = staticmethod(eager.linear_stats)
    rescue = staticmethod(eager.rescue)
    token_loss = staticmethod(eager.token_loss)
    loss_norm = staticmethod(eager.loss_norm)
    reduce_loss = staticmethod(eager.reduce_loss)
    row_gradient = staticmethod(eager.row_gradient)
    dlogits = staticmethod(eager.dlogits)
    counted_gemm = staticmethod(eager.counted_gemm)
    write_label_value = staticmethod(eager.write_label_value)
    scale = staticmethod(eager.scale)
    scale_rows = staticmethod(eager.scale_rows)


def kernels_of(impl: str) -> Kernels:
    """Return an implementation; eager alone needs no working triton."""
    found: Any = eager
    if impl == "triton":
        from flce_dist.kernels import gpu as found
    return found
