"""Compile the kernels of filtered gradients for a GPU that is not here: part of aot_compile.py."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from flce_dist.kernels import tuning
from flce_dist.kernels.filtered import dlogits as filter_dlogits
from flce_dist.kernels.filtered import gemms as filter_gemms
from flce_dist.kernels.filtered import stats as filter_stats
from flce_dist.kernels.filtered import tile_lists
from flce_dist.kernels.filtered import tiles as filter_tiles
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss_formulas import TokenStats

T, V, H = 512, 1000, 4096


def compile_filter(arch: str, dtype: torch.dtype) -> dict[str, Any]:
    """Call every launcher as the op would, on CPU tensors, and compile where it would launch."""
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled[prefix + self.__name__.removeprefix("_").removesuffix("_kernel")] = kernel

    prefix = ""
    with (
        mock.patch.object(tuning, "device_arch", lambda device: (arch, 132)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        # Read by compile_only.
        for prefix in ("", "main_grad ") if dtype == torch.bfloat16 else ("",):
            _call_launchers(dtype, main_grad=bool(prefix))
    return compiled


def _call_launchers(dtype: torch.dtype, *, main_grad: bool) -> None:
    """As usual, or with every option: bias, smoothing, unfolded scales, main_grad in fp32."""
    new: Callable[..., torch.Tensor] = torch.empty
    labels, token = torch.zeros(T, dtype=torch.int64), new(T)
    hidden, weight = new(T, H, dtype=dtype), new(V, H, dtype=dtype)
    bias = new(V, dtype=dtype) if main_grad else None
    logits = ShardLogits(hidden, weight, bias, labels, 0, -100, 1.0, None)
    stats = TokenStats(token, token, token)
    kept, _ = filter_stats.kept_tiles(logits, filter_stats.new_tile_stats(logits), stats, 0.1)
    q = filter_stats.tile_profile(logits, token, kept, labels[: filter_tiles.SAMPLE])
    filter_stats.tile_means(q, weight)
    lists = tile_lists.tile_lists(kept, 2 * len(kept))
    affine = () if main_grad else (token,)
    rows = RowGradient(token if main_grad else None, token, token, affine, None)
    d = filter_dlogits.new_kept_buffer(logits, 2 * len(kept))
    filter_dlogits.kept_dlogits(logits, rows, lists, 0, out=d)
    filter_gemms.add_kept_dhidden(d, weight, lists, 0, new(T, H))
    hbar, row = new(kept.shape[1], H), new(H) if main_grad else None
    out = new(V, H, dtype=torch.float32 if main_grad else dtype)
    filter_gemms.kept_dweight(d, hidden, lists, 0, q, hbar, row, out=out, accumulates=main_grad)
    filter_gemms.add_kept_dbias(d, rows.scale, lists, 0, new(V))
