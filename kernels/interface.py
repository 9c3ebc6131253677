"""The kernel interface as a type: what ``gpu.py``, which documents it, and ``eager.py`` offer."""

from typing import Any

from flce_dist.kernels import eager


class Kernels:
    """The passes over logits, [T, N] and [T] that every schedule is made of."""

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
    """Import an implementation on demand: eager alone needs no working triton."""
    kernels: Any = eager
    if impl == "triton":
        from flce_dist.kernels import gpu

        kernels = gpu
    return kernels
