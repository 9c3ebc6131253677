"""Training with the vocabulary split over data-parallel ranks, beside FSDP2's own head."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flce_dist.testing import relative_rms
from tests.on_ranks import on_ranks
from tests.problems import IGNORE

H, V_ALL = 16, 101
PAGE = (Path(__file__).parent.parent / "docs" / "data_parallel_head.md").read_text()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(V_ALL, H), nn.Linear(H, H)
        self.head = nn.Linear(H, V_ALL, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, loss_of: Any = None) -> Tensor:
        hidden = self.layer(self.embedding(ids)).tanh()
        if loss_of is not None:
            return loss_of(hidden, labels)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def trained(model: Model, rank: int, loss_of: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps on this rank's sequences; return its losses, and the whole parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        ids = torch.randint(V_ALL, (2, 9), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : 4 * rank] = IGNORE  # ranks count different numbers of tokens
        loss = model(ids[:, :-1], labels, loss_of)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses += [float(loss), float(norm.full_tensor())]  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: x.full_tensor().detach() for name, x in model.state_dict().items()}
    return losses, whole


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=["fp32", "bf16"]
)
@on_ranks(2)
def test_training_is_that_of_fsdp(group, dtype, most):
    """The Python of docs/data_parallel_head.md, after FSDP2 and ``F.cross_entropy``."""
    torch.manual_seed(0)
    theirs = Model()
    ours, start = copy.deepcopy(theirs), theirs.head.weight.detach().clone()
    policy, mesh = MixedPrecisionPolicy(param_dtype=dtype), init_device_mesh("cpu", (2,))
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    names: dict[str, Any] = {"model": ours, "mesh": mesh, "mp_policy": policy, "nn": nn}
    _, block = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    exec(block, names)

    losses, expected = trained(theirs, group.rank())
    found, weights = trained(ours, group.rank(), names["loss_of"])
    torch.testing.assert_close(found, losses, rtol=most, atol=0.0)
    assert losses[0] != losses[2]
    for name, weight in expected.items():
        moved = relative_rms(start, weight) if name == "head.weight" else 1.0
        assert relative_rms(weights[name], weight) < most * moved, name
