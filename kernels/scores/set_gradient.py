"""The gradient of scores over sets of ids, in PyTorch, for both implementations: passes over [N].

T = tokens, N = ids of all tokens.
"""

import torch
from torch import Tensor

from flce_dist.kernels.scores.token_ids import TokenIds
from flce_dist.kernels.token_gradient_formulas import softcap_grad
from flce_dist.kernels.token_loss_formulas import FAR


def set_gradient(
    z: Tensor,
    ids: TokenIds,
    logprob: Tensor,
    entropy: Tensor | None,
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
    inverse_temperature: Tensor | None,
    *,
    softcap: float | None,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    """Return [N]: the gradient of each entry's product ``h . w``, 0 at padding; and G [T].

    upstream are gradients of logprob [N] in the caller's order, lse [T] and entropy [T]. With g_n
    those of logprob, G their sum over the token and H the entropy::

        dz_n = g_n + p_n (dlse - G - dH (logprob_n + H))

    An entry that repeats an id has g_n, but no p_n: the set has each id once. Where p_n is near 1,
    1 - p_n keeps its relative precision.
    """

    def each(x: Tensor) -> Tensor:
        return x.index_select(0, ids.token)

    dlogprob, dlse, dentropy = upstream
    logprob = logprob.index_select(0, ids.place)
    p = logprob.exp().where(ids.first, 0.0)
    dz, sums = torch.zeros_like(z), z.new_zeros(len(ids.offsets) - 1)
    if dlse is not None:
        dz += p * each(dlse)
    if dentropy is not None and entropy is not None:
        dz -= p * (logprob.clamp_min(FAR) + each(entropy)) * each(dentropy)
    if dlogprob is not None and len(z):
        g = dlogprob.index_select(0, ids.place).where(ids.ids >= 0, 0.0)
        sums = torch.segment_reduce(g, "sum", offsets=ids.offsets, unsafe=True, initial=0)
        total = each(sums)
        dz += (g - p * total).where(p <= 0.5, g - total - logprob.expm1() * total)
    inverse = None if inverse_temperature is None else each(inverse_temperature)
    dz *= softcap_grad(z, softcap, inverse) * logit_scale
    return (dz if inverse is None else dz * inverse).where(ids.ids >= 0, 0.0), sums
