"""Problems and comparisons for the kernels of filtered gradients."""

import torch
from torch import Tensor

from flce_dist.kernels.filtered.tiles import TILE_T, TILE_V
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.testing import relative_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
T, V, H = 300, 700, 40  # nothing fills its last tile; H is whole 16 bytes in every dtype
START = 100  # of this shard, among 900 rows
IGNORED = -100


def shard(
    dtype: torch.dtype = torch.float32, T: int = T, V: int = V, H: int = H, bias: bool = False
) -> ShardLogits:
    """Hidden states whose logits differ by several nats, every seventh label ignored."""
    g = torch.Generator().manual_seed(T + V + H)
    hidden = torch.randn(T, H, generator=g).to(DEVICE, dtype)
    weight = (2 * torch.randn(V, H, generator=g) / H**0.5).to(DEVICE, dtype)
    labels = torch.randint(0, V + 200, (T,), generator=g)
    labels[::7] = IGNORED
    hidden[::7] = torch.nan
    b = torch.randn(V, generator=g).to(DEVICE, dtype) if bias else None
    if b is not None:
        b[::9] = -torch.inf
    return ShardLogits(hidden, weight, b, labels.to(DEVICE), START, IGNORED, 0.5, None)


def logits_of(shard: ShardLogits) -> Tensor:
    """[T, V] in fp64, 0 in ignored rows."""
    z = shard.logit_scale * shard.hidden.double() @ shard.weight.double().T
    if shard.bias is not None:
        z = z + shard.bias.double()
    return z.where(shard.counted[:, None], 0.0)


def label_column(shard: ShardLogits) -> Tensor:
    """[T, V] bool: the column of each counted token's label."""
    column = torch.arange(shard.V, device=DEVICE) + shard.vocab_start_index
    return (column == shard.labels[:, None]) & shard.counted[:, None]


def masks() -> dict[str, Tensor]:
    """Choices of kept tiles [3, 3]."""
    g = torch.Generator().manual_seed(0)
    some = torch.rand(3, 3, generator=g) < 0.5
    no_block, no_column = some.clone(), some.clone()
    no_block[1], no_column[:, 1] = False, False
    full, none = torch.ones(3, 3, dtype=torch.bool), torch.zeros(3, 3, dtype=torch.bool)
    named = {"some": some, "no block": no_block, "no column": no_column, "all": full, "none": none}
    return {name: mask.to(DEVICE) for name, mask in named.items()}


def spread(mask: Tensor, T: int = T, V: int = V) -> Tensor:
    """[blocks, J] to [T, V]."""
    return mask.repeat_interleave(TILE_T, 0)[:T].repeat_interleave(TILE_V, 1)[:, :V]


def close(result: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    error = relative_rms(result.double(), truth.double())
    assert error < 2 * EPS[dtype], f"relative rms {error:.1e}"
