"""What filtered gradients are made of: the functions of ``gpu.py``, or the same of ``eager.py``."""

from typing import Any


def filter_kernels_of(impl: str) -> Any:
    """As ``kernels_of``. Lists of kept tiles are what ``tile_lists`` of the same one returns."""
    if impl == "triton":
        from flce_dist.kernels.filtered import gpu

        return gpu
    from flce_dist.kernels.filtered import eager

    return eager
