"""What schedules are made of: the functions of ``gpu.py``, or the same of ``eager.py``."""

from typing import Any


def kernels_of(impl: str) -> Any:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels import gpu

        return gpu
    from flce_dist.kernels import eager

    return eager
