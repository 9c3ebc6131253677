"""The kernels of filtered gradients as a type: what ``gpu.py`` and ``eager.py`` both offer."""

from typing import Any

from flce_dist.kernels.filtered import eager


class FilterKernels:
    """Lists of kept tiles are what ``tile_lists`` of the same implementation returns."""

    new_tile_stats = staticmethod(eager.new_tile_stats)
    kept_tiles = staticmethod(eager.kept_tiles)
    profile_sample = staticmethod(eager.profile_sample)
    tile_profile = staticmethod(eager.tile_profile)
    rank_one = staticmethod(eager.rank_one)
    tile_lists = staticmethod(eager.tile_lists)
    new_kept_buffer = staticmethod(eager.new_kept_buffer)
    kept_dlogits = staticmethod(eager.kept_dlogits)
    add_kept_dhidden = staticmethod(eager.add_kept_dhidden)
    kept_dweight = staticmethod(eager.kept_dweight)
    add_kept_dbias = staticmethod(eager.add_kept_dbias)


def filter_kernels_of(impl: str) -> FilterKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    kernels: Any = eager
    if impl == "triton":
        from flce_dist.kernels.filtered import gpu

        kernels = gpu
    return kernels
