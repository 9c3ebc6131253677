"""LinearCrossEntropy sharded by tensor parallelism and FSDP2, for tests."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flce_dist.module import LinearCrossEntropy

H, VOCAB = 24, 507  # 507 over 4: 127, 127, 127, 126
PADDED = 512


def make(group: dist.ProcessGroup | None, seed: int = 0, **kwargs: Any) -> LinearCrossEntropy:
    torch.manual_seed(seed)
    sizes = kwargs.pop("hidden_size", H), kwargs.pop("vocab_size", VOCAB)
    return LinearCrossEntropy(*sizes, tp_group=group, **kwargs)


class Layout(NamedTuple):
    """Ranks that share the vocabulary, and ranks over which FSDP2 cuts the rows of each again."""

    tp: int = 1
    fsdp: int = 1
    replicas: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.fsdp * self.replicas

    @functools.cache  # noqa: B019
    def meshes(self) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
        """The tensor-parallel group of this rank and the mesh for ``fully_shard``, made once."""
        if self.size == 1:
            return None, None
        sizes = {"replicas": self.replicas, "fsdp": self.fsdp, "tp": self.tp}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        data = mesh["replicas", "fsdp"] if self.replicas > 1 else mesh["fsdp"]
        return mesh.get_group("tp") if self.tp > 1 else None, data if self.fsdp > 1 else None

    def make(self, *, on_meta: bool = False, **kwargs: Any) -> LinearCrossEntropy:
        """``make`` with these ranks; on_meta: through the meta device."""
        group, mesh = self.meshes()
        with torch.device("meta" if on_meta else "cpu"):
            layer = make(group, **kwargs)
        if mesh is not None:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        if on_meta:
            layer.to_empty(device="cpu")
            torch.manual_seed(kwargs.get("seed", 0))
            layer.reset_parameters()
        return layer


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(fsdp=2), Layout(tp=2, fsdp=2)]
EVERY_LAYOUT = [*LAYOUTS, Layout(fsdp=2, replicas=2)]
each_layout = pytest.mark.parametrize(
    "layout", EVERY_LAYOUT, ids=lambda x: f"tp{x.tp} fsdp{x.fsdp} x {x.replicas}"
)


def check_attributes(layer: nn.Module) -> None:
    expected = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    for parameter in layer.parameters():
        assert expected.items() <= vars(parameter).items()


def assert_same_state(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
