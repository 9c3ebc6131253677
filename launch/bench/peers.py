"""Other implementations of the same loss, each behind one small adapter.

An adapter is ``load(tp_group) -> loss_of(hidden, weight, labels)``, which returns the mean loss. It
imports what it needs when called, so that a peer which is not installed costs its own row alone.

A peer that splits the vocabulary over ranks says ``parallel=True`` and gets the group, the whole
labels [T] and this rank's rows of the weight; hidden is whole, or [T / P, H], this rank's tokens,
under sequence parallelism. What it keeps from call to call it frees in ``drop_buffers``.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flce_dist import linear_cross_entropy
from flce_dist.launch.bench import megatron_peer
from flce_dist.launch.process_group import own_tokens, rank_and_size, reduced

TOP_K_PEER = "torch_top_k"
DROPPED_EPS = 2.0**-12
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(hidden [T, H], weight [V, H], labels [T]) -> mean loss``."""


class Skipped(RuntimeError):
    """Why a peer cannot run here, which is no error: it is not installed, or made for one rank."""


@dataclass(frozen=True)
class Peer:
    """``package`` is the distribution whose version belongs to a result."""

    load: Callable[[dist.ProcessGroup | None], LossFunction]
    package: str | None = None
    parallel: bool = False
    drop_buffers: Callable[[], None] | None = None


def torch_eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits and loss in the operands' dtype."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def canonical(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits by a GEMM in the operands' dtype, their loss in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def indexed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Ours, of rows chosen by a mask: the host waits for their number."""
    counted = labels != -100
    return linear_cross_entropy(hidden[counted], weight, labels[counted])


def top_k(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The 64 best ids by ``torch.topk`` of fp32 logits, of 1024 tokens at a time; returns lse."""
    lse = []
    for tokens in hidden.split(1024):
        logits = F.linear(tokens, weight).float()
        logits.topk(64)
        lse.append(logits.logsumexp(-1))
    return torch.cat(lse).mean()


class _Dropped(torch.autograd.Function):
    """An exact loss, and no gradients in tiles of 128 tokens by 256 rows that are all unlikely.

    As Cut Cross-Entropy (arXiv:2411.09009) leaves out its blocks. A tile counts if it holds a label
    or a probability of DROPPED_EPS. Both gradients are made in forward, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, drops_dweight: bool
    ) -> Tensor:
        whole = weight.float()
        losses = []
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(whole)
        for here in torch.arange(len(hidden), device=hidden.device).split(2048):
            x = hidden[here].float()
            token = torch.arange(len(here), device=hidden.device)
            logp = (x @ whole.T).log_softmax(1)
            losses.append(-logp[token, labels[here]])
            dz = logp.exp_()
            tiles = F.pad(dz, (0, -dz.shape[1] % 256, 0, -len(dz) % 128))
            kept = tiles.view(len(tiles) // 128, 128, -1, 256).amax((1, 3)) >= DROPPED_EPS
            kept[token // 128, labels[here] // 256] = True
            dz[token, labels[here]] -= 1.0
            dz /= len(hidden)
            if not drops_dweight:
                dweight.addmm_(dz.T, x)
            kept = kept.repeat_interleave(256, 1)[:, : dz.shape[1]]
            dz *= kept.repeat_interleave(128, 0)[: len(dz)]
            if drops_dweight:
                dweight.addmm_(dz.T, x)
            dhidden[here] = (dz @ whole).to(hidden.dtype)
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        return dhidden * dloss, dweight * dloss, None, None


def _dropped(drops_dweight: bool) -> Peer:
    return Peer(lambda _: lambda *operands: _Dropped.apply(*operands, drops_dweight))


def _compiled(loss_of: LossFunction) -> Peer:
    return Peer(lambda _: torch.compile(loss_of, dynamic=False))


def _load_torch_linear_cross_entropy(tp_group: object) -> LossFunction:
    if not hasattr(F, "linear_cross_entropy"):
        raise Skipped(f"torch {torch.__version__} has no linear_cross_entropy")
    # Without options it is the reference implementation, with all logits.
    return functools.partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def _liger(accum_dtype: torch.dtype | None) -> Peer:
    def load(tp_group: object) -> LossFunction:
        import liger_kernel.transformers as liger  # type: ignore[import-not-found,import-untyped,unused-ignore]

        module = liger.LigerFusedLinearCrossEntropyLoss(accum_dtype=accum_dtype)
        return lambda hidden, weight, labels: module(weight, hidden, labels)

    return Peer(load, "liger-kernel")


def _cce(**options: object) -> Peer:
    def load(tp_group: object) -> LossFunction:
        import cut_cross_entropy  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return functools.partial(cut_cross_entropy.linear_cross_entropy, **options)

    return Peer(load, "cut-cross-entropy")


def _load_gathered_weight(tp_group: dist.ProcessGroup | None) -> LossFunction:
    """As FSDP2 does: gather the weight, take this rank's tokens, and reduce-scatter dweight."""

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        mesh = DeviceMesh.from_group(tp_group or [], weight.device.type)
        split = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        whole = split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        own = labels[own_tokens(len(labels), tp_group)]
        loss = linear_cross_entropy(hidden, whole, own, reduction="sum") / len(labels)
        return loss + reduced(loss.detach().clone(), tp_group) - loss.detach()  # of all tokens

    return loss_of


def _megatron(fused: bool) -> Peer:
    load = functools.partial(megatron_peer.load, fused)
    return Peer(load, "megatron-core", parallel=True, drop_buffers=megatron_peer.drop_buffers)


PEERS: dict[str, Peer] = {
    "canonical": Peer(lambda _: canonical),
    "torch_eager": Peer(lambda _: torch_eager),
    "indexed": Peer(lambda _: indexed),
    TOP_K_PEER: Peer(lambda _: top_k),
    "torch_compile": _compiled(torch_eager),
    "torch_compile_fp32": _compiled(canonical),
    "torch_linear_cross_entropy": Peer(_load_torch_linear_cross_entropy),
    "liger": _liger(None),
    "liger_fp32": _liger(torch.float32),
    "cce": _cce(),
    # Its default drops small gradients; this one keeps all.
    "cce_unfiltered": _cce(filter_eps=None),
    # Of its newer releases; an older one says that it does not know the name.
    "cce_exact": _cce(impl="cce_exact"),
    "cce_kahan_full_c": _cce(impl="cce_kahan_full_c"),
    "dropped": _dropped(drops_dweight=True),
    "dropped_dhidden": _dropped(drops_dweight=False),
    "gathered_weight": Peer(_load_gathered_weight, parallel=True),
    "megatron_fused": _megatron(fused=True),
    "megatron_unfused": _megatron(fused=False),
}


def require_one_rank(tp_group: dist.ProcessGroup | None) -> None:
    """Raise ``Skipped`` on several ranks, for a peer that needs the whole vocabulary on its own."""
    if rank_and_size(tp_group)[1] > 1:
        raise Skipped("it does not split the vocabulary over ranks")


def load_peer(name: str, tp_group: dist.ProcessGroup | None) -> LossFunction:
    """Return the peer's loss function; raise ``Skipped`` if it cannot run here."""
    peer = PEERS[name]
    if not peer.parallel:
        require_one_rank(tp_group)
    try:
        return peer.load(tp_group)
    except ModuleNotFoundError as error:
        raise Skipped(f"{peer.package or name} is not installed: {error}") from error
