"""Calls of the launchers whose kernels ``aot_compile`` compiles, as the op makes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flce_dist.kernels import gpu, tuning
from flce_dist.kernels.best import gpu as best_gpu
from flce_dist.kernels.best.interface import Noise
from flce_dist.kernels.divergence import gpu as pair_gpu
from flce_dist.kernels.divergence.formulas import TOTALS, Measure
from flce_dist.kernels.filtered import gpu as filter_gpu
from flce_dist.kernels.ids.token_ids import entries_by_id
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits, new_window
from flce_dist.kernels.logits.target import NamedIds, Target
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats

H = 4096
# T and V for each tile of an architecture, and one tile. V is no multiple of any tile, and one
# segment of the statistics.
SHAPES = (8192, 16976), (128, 16976), (64, 16976), (1, 100)


def calls_of(logits: ShardLogits) -> list[tuple[str, Callable[[], Any]]]:
    """Calls of launchers, as the op makes them, with what is special about each.

    Of logits whose tiles sum groups of columns in one order, only those in which that matters.
    """
    token = torch.empty(logits.T)
    out = new_window(logits.T, logits.V, logits.hidden.dtype, token.device)
    bias = torch.empty(logits.V, dtype=out.dtype)
    with_temperature = logits._replace(inverse_temperature=token)
    in_groups = logits.group_v is not None
    is_largest = logits.T == SHAPES[0][0]
    is_bf16 = out.dtype == torch.bfloat16
    # Most special calls are compiled for it alone: their kernels differ from plain ones everywhere
    # in the same few lines.
    is_hopper = tuning.device_arch(out.device)[0] == "sm_90"

    def statistics(
        *windows: torch.Tensor, metrics: bool = False, given: ShardLogits = logits
    ) -> None:
        cache = ColumnCache(windows)
        target = Target(with_entropy=metrics, with_sum_z=metrics)
        sums = gpu.new_sums(logits, target)
        gpu.linear_stats(given, token, target, cache=cache, others_max=token, sums=sums)
        if windows and not in_groups:
            gpu.rescue(given, token, token, sums, target, cache=cache)

    def label_logit(**changes: Any) -> None:
        gpu.logits_at_ids(logits._replace(**changes), logits.labels, None, vocab_size=logits.V)

    def scale_rows() -> None:
        hidden = logits.hidden
        gpu.scale_rows(
            hidden, token, logits.labels, ignore_index=-100, plus=(token, hidden), out=hidden
        )  # fmt: skip

    def dlogits(*affine: torch.Tensor, given: ShardLogits = logits) -> None:
        gpu.dlogits(given, token, token, affine, out=out)

    calls: list[tuple[str, Callable[[], Any]]] = [(" cached", partial(statistics, out))]
    if logits.T > 1:
        calls.insert(0, ("", statistics))  # first, since a kernel is reported once
    if not in_groups and logits.T > 1:
        calls += [
            ("", label_logit),
            (" bias", partial(label_logit, bias=bias, softcap=5.0)),
            ("", partial(gpu.scale, out, token[0], out=out)),
            ("", scale_rows),
            ("", dlogits),
            (" scaled", partial(dlogits, token)),
            (" affine", partial(dlogits, token, token, token)),
            (" divergence", partial(divergence, logits, out)),
        ]
    if in_groups and is_hopper and is_bf16:
        of_best = dict(best(logits, token))
        calls += [(f"{name} in groups", of_best[name]) for name in (" rank", " many")]
    if not in_groups and is_largest:
        if is_hopper:
            calls.append((" entropy", partial(statistics, metrics=True)))
        if is_hopper or is_bf16:
            calls.append(("", partial(filtered, logits, False)))
        if is_hopper and is_bf16:
            calls += [
                (" main_grad", partial(filtered, logits._replace(bias=bias), True)),
                (" tempered", partial(statistics, out, given=with_temperature)),
                (" tempered", partial(dlogits, token, given=with_temperature)),
                (" named", partial(scores, logits, out)),
                (" counted", partial(counted, logits, out)),
                *best(logits, token),
            ]
    return calls


def counted(logits: ShardLogits, d: torch.Tensor) -> None:
    """Call what ends at a count: one segment of the statistics, and each form of the GEMMs."""
    n = torch.zeros((), dtype=torch.int32)
    token = torch.empty(logits.T)
    cache = ColumnCache((d,))
    sums = gpu.new_sums(logits, Target())
    logits = logits._replace(n_counted=n)
    gpu.linear_stats(logits, token, Target(), cache=cache, others_max=token, sums=sums)
    gpu.dlogits(logits, token, token, (token,), out=d)
    gemm = partial(gpu.counted_gemm, d, count=n)
    for adds in (False, True):
        acc = torch.empty(logits.T, H)
        gemm(logits.weight, sums_tokens=False, out=acc, adds=adds)
        for out in (logits.weight, logits.weight.float()):
            gemm(logits.hidden, sums_tokens=True, row=torch.empty(H), out=out, adds=adds)
    few = logits.hidden[:, :8].contiguous()
    gemm(few, sums_tokens=True, out=torch.empty(logits.V, 8), adds=False)


def divergence(logits: ShardLogits, out: torch.Tensor) -> None:
    """Call the passes of each divergence, with the second model's logits kept and not."""
    s, t = (new_window(logits.T, logits.V, torch.float32, out.device) for _ in range(2))
    rows = torch.empty(5, logits.T)
    scale = torch.empty(logits.T)
    pair_gpu.pair_logits(logits, out=s, rows=rows[:2])
    for kept in (t, None):
        pair_gpu.pair_logits(logits, out=kept, rows=rows[2:], first=s, first_max=rows[0])
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        measure = Measure(kind, 0.5)
        stats = pair_gpu.stats_of_totals(rows[None], measure, rows.dtype)
        pair_gpu.pair_dlogits(s, t, logits, stats, measure, scale, out=out)
        for each, is_invariant in ((measure, False), (measure, True), (TOTALS, True)):
            pair_gpu.pair_sums(
                s, t, logits, stats, each, with_metrics=False, is_invariant=is_invariant
            )


def scores(logits: ShardLogits, out: torch.Tensor) -> None:
    """Call the launchers of scores at 64 ids of each token, over the vocabulary and over ids."""
    z = torch.empty(64 * logits.T)
    token = torch.empty(logits.T)
    n = torch.zeros(len(z), dtype=torch.int64)
    offsets = 64 * torch.arange(logits.T + 1)
    ids = gpu.sorted_ids(n.view(-1, 64), offsets, logits.V)
    target = Target(named=NamedIds(n, offsets[:-1], offsets[1:], z))
    gpu.logits_at_ids(logits, n, n, vocab_size=logits.V)
    cache = ColumnCache((out,))
    sums = gpu.new_sums(logits, target)
    gpu.linear_stats(logits, token, target, cache=cache, others_max=token, sums=sums)
    gpu.rescue(logits, token, token, sums, target, cache=cache)
    stats = TokenStats(token, token, token)
    for rest in (None, stats, stats._replace(sum_ez=token)):
        has_entropy = rest is None or rest.sum_ez is not None
        gpu.set_scores(z, ids, rest, vocab_size=logits.V, with_entropy=has_entropy)
    for each in (None, token):
        softcap = None if each is None else 30.0
        gpu.set_gradient(
            z, ids, z, each, (z, token, each), each, softcap=softcap, logit_scale=2.0
        )  # fmt: skip
    gpu.write_at_ids(out, n, n, z, 0, -1)
    gpu.dhidden_of_ids(z, ids, logits.weight, vocab_start_index=0, out=logits.hidden)
    entries = entries_by_id(ids, z)
    for into, adds in ((logits.weight, False), (logits.weight.float(), True)):
        gpu.dweight_of_ids(entries, logits.hidden, vocab_start_index=0, out=into, adds=adds)


def best(logits: ShardLogits, token: torch.Tensor) -> list[tuple[str, Callable[[], Any]]]:
    """Calls of the pass of best ids: of one, of many, of ranks alone, of samples; and the rest."""
    call = partial(best_gpu.best_of_shard, logits, label_logit=None, noise=None)
    shifted = logits._replace(vocab_start_index=3)
    unaligned = partial(best_gpu.best_of_shard, shifted, label_logit=None)

    def rest() -> None:
        lse = torch.empty(logits.T, dtype=torch.float64)
        counted = logits.counted
        best_gpu.label_logits(logits, vocab_size=logits.V)
        best_gpu.relative_to(token, token, torch.empty(2, logits.T, dtype=torch.float64))
        best_gpu.merged_lse(token, torch.empty(2, logits.T, dtype=torch.float64))
        keys = logits.labels.new_empty(2, logits.T, 64)
        best_gpu.merged_ids(keys, lse, counted, k=64, top_p=0.9)

    return [
        (" one", partial(call, k=1)),
        (" rank", partial(call, k=0, label_logit=token)),
        (" many", partial(call, k=64)),
        (" most", partial(call, k=2048)),
        (" sample", partial(call, k=1, noise=Noise(1, logits.labels))),
        (" sample", partial(unaligned, k=1, noise=Noise(1, logits.labels))),
        ("", rest),
    ]


def filtered(logits: ShardLogits, main_grad: bool) -> None:
    """Call the launchers of filtered gradients, as usual, or with every option of theirs."""
    T = logits.T
    V = logits.V
    weight = logits.weight
    token = torch.empty(T)
    of_d, scale = (None, token) if main_grad else (token, None)
    stats = TokenStats(token, token, token)
    kept, mass = filter_gpu.kept_tiles(logits, filter_gpu.new_tile_stats(logits), stats, 0.1)
    sample = filter_gpu.profile_sample(logits.labels, token, ignore_index=-100)
    total = filter_gpu.tile_profile(logits, token, kept, sample)
    q, *_ = filter_gpu.rank_one(logits, total, mass, of_d, with_means=not main_grad)
    lists = filter_gpu.tile_lists(kept, 2 * len(kept))
    rows = RowGradient(scale, token, token, (), None)
    d = filter_gpu.new_kept_buffer(logits, 2 * len(kept))
    filter_gpu.kept_dlogits(logits, rows, of_d, lists, 0, out=d)
    filter_gpu.add_kept_dhidden(d, weight, lists, 0, torch.empty(T, H))
    hbar = torch.empty(kept.shape[1], H)
    row = torch.empty(H) if main_grad else None
    out = torch.empty(V, H, dtype=torch.float32 if main_grad else weight.dtype)
    filter_gpu.kept_dweight(
        d, logits.hidden, lists, 0, q, hbar, row, out=out, accumulates=main_grad
    )
    filter_gpu.add_kept_dbias(d, scale, lists, 0, torch.empty(V))
