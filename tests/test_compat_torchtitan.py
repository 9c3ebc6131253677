"""flce_dist.compat.torchtitan: steps of torchtitan's trainer on gloo ranks, with either loss.

Each trainer has ranks of its own, since torchtitan keeps meshes for the life of a process.
"""
# ruff: noqa: E402

import copy
import functools
import pickle
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.testing import relative_rms, run_ranks

pytest.importorskip(
    "torchtitan",
    reason="torchtitan is not installed: `make users` installs it and runs these tests",
)

from torchtitan.tools import utils

nothing: Any = lambda *_: None  # noqa: E731
utils.device_type, utils.device_module = "cpu", types.SimpleNamespace(
    set_device=nothing, empty_cache=nothing, reset_peak_memory_stats=nothing,
    current_device=lambda: 0, get_device_name=lambda _: "cpu", memory_stats=lambda _: {},
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=1),
)  # fmt: skip
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from flce_dist.compat import torchtitan as compat
from tests.doc_scripts import ROOT, scripts_of

OURS = "flce_dist.compat.torchtitan.linear_cross_entropy_loss"
VOCAB, SHAPE = 2048, (2, 16)


class Tokens(BaseDataLoader):
    """Random tokens, of which data ranks ignore different shares."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.rank = dp_rank

    def __iter__(self) -> Iterator[Any]:
        g = torch.Generator().manual_seed(self.rank)
        while True:
            ids, labels = torch.randint(VOCAB, (2, *SHAPE), generator=g)
            labels[torch.rand(SHAPE, generator=g) < 0.2 * (1 + self.rank)] = -100
            positions = torch.arange(SHAPE[1]).expand(SHAPE).contiguous()
            yield {"input": ids, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = nothing


def trainer(fused: bool, parallelism: dict[str, Any], **debug: Any) -> Any:
    """torchtitan's trainer of its debug model with one layer, whose attention runs on CPUs."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    config.training.local_batch_size, config.training.seq_len = SHAPE
    config.training.steps, config.training.mixed_precision_param = 3, "float32"
    config.validator.enable = False
    config.debug.seed = 1
    for name, value in debug.items():
        setattr(config.debug, name, value)
    config.parallelism = ParallelismConfig(**parallelism)
    config.override.imports = [OURS] if fused else []
    built = config.build()
    for module in built.model_parts[0].modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no other
            module.set_force_sum_reduction_for_comms(True)
    return built


def steps_rank(
    group: dist.ProcessGroup, fused: bool, parallelism: dict[str, Any], **debug: Any
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """What three steps log (loss, largest of a rank, norm), a loss without gradients; gradients."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the group
    built = trainer(fused, parallelism, **debug)
    assert type(built.loss_fn) is (compat.LinearCrossEntropyLoss if fused else ChunkedLossWrapper)
    (model,), logged, gradients = built.model_parts, [], []
    step, built.metrics_processor.log = built.optimizers.step, lambda *x, **_: logged.append(x[1:4])

    def whole(x: Any) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x.clone()

    def noted() -> None:
        gradients.append({name: whole(x.grad) for name, x in model.named_parameters()})
        step()

    built.optimizers.step = noted
    batches = built.batch_generator(built.dataloader)
    for _ in range(3):
        built.step += 1
        built.train_step(batches)
    inputs, labels, more = built.post_dataloading_process(*next(batches))
    with torch.no_grad(), built.train_context():
        loss, _ = built.loss_fn(model(inputs, **more), labels, torch.tensor(7))
    built.close()
    return [torch.tensor(logged), whole(loss)], gradients


def steps(size: int, fused: bool, parallelism: dict[str, Any], **debug: Any) -> Any:
    call = functools.partial(steps_rank, fused=fused, parallelism=parallelism, **debug)
    return run_ranks(call, size, backend="gloo", timeout_s=300)


NEW = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="torchtitan's spmd_types needs a newer torch"
)
CASES = {
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "tp and sp": (2, {"tensor_parallel_degree": 2}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    "fsdp, tp and sp": (4, {"tensor_parallel_degree": 2}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "backend", [pytest.param("spmd_types", marks=NEW), "partial_dtensor", "full_dtensor"]
)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_torchtitans(case, backend):
    size, parallelism = CASES[case]
    compare(size, parallelism | {"spmd_backend": backend})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [(2, {}), (4, {}), (4, {"tensor_parallel_degree": 2})], ids=str)
def test_three_steps_with_context_parallelism(case, monkeypatch):
    """Attention, which on CPUs has no ring of ranks, is replaced by what needs none."""

    def forward(self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **_: Any) -> Tensor:
        return q_BLNH + k_BLNH.tanh() * v_BLNH

    monkeypatch.setattr(ScaledDotProductAttention, "forward", forward)
    size, more = case
    compare(size, {"context_parallel_degree": 2, "spmd_backend": "partial_dtensor", **more})


def compare(size: int, given: dict[str, Any]) -> None:
    theirs, ours = (steps(size, fused, given) for fused in (False, True))
    for (losses, gradients), (found, others) in zip(theirs, ours, strict=True):
        assert all(relative_rms(*x) < 1e-5 for x in zip(found, losses, strict=True))
        assert len(gradients) == 3
        for one, other in zip(gradients, others, strict=True):
            assert all(x.abs().max() > 0 for x in one.values())
            assert all(relative_rms(other[name], x) < 1e-5 for name, x in one.items())


@NEW
@pytest.mark.filterwarnings("ignore")
def test_under_torchtitans_type_checks():
    steps(2, True, {"spmd_backend": "spmd_types"}, spmd_typechecking=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_computes_with_its_own_weight(copied):
    loss = compat.LinearCrossEntropyLoss.Config().build()
    lm_head = Linear(Linear.Config(in_features=2, out_features=3))
    loss.set_lm_head(lm_head)
    twin = copied(lm_head)
    hidden = torch.ones(1, 4, 2)
    labels = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        lm_head.weight.zero_()
        twin.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
        assert not lm_head(hidden).any() and twin(hidden)[0, 0, 0] == 1.0
        of_three = torch.tensor(3.0).log() * 4
        torch.testing.assert_close(lm_head(hidden, labels), of_three)
        assert twin(hidden, labels) < of_three


def test_what_is_refused():
    class Scaled(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2.0 * super().forward(input)

    loss = compat.LinearCrossEntropyLoss.Config().build()
    with pytest.raises(NotImplementedError, match=r"an nn\.Linear, got Scaled"):
        loss.set_lm_head(Scaled(Linear.Config(in_features=2, out_features=2)))
    config = llama3_debugmodel()
    config.override.imports = [(OURS, {"schedule": "in_forward"})]
    config.loss = CrossEntropyLoss.Config()
    apply_overrides(config.override, config)
    assert config.loss == compat.LinearCrossEntropyLoss.Config(options={"schedule": "in_forward"})
    config.loss = MSELoss.Config()
    with pytest.raises(NotImplementedError, match="must be CrossEntropyLoss, got MSELoss"):
        apply_overrides(config.override, config)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"soft_cap": 5.0}, TypeError, "'soft_cap'. Did you mean 'softcap'"),
    ({"reduction": "mean"}, TypeError, "unexpected keyword argument 'reduction'"),
    ({"sequence_parallel": True}, TypeError, "unexpected keyword argument 'sequence_parallel'"),
    ({"tp_group": None}, TypeError, "unexpected keyword argument 'tp_group'"),
    ({"schedule": "inforward"}, ValueError, "^schedule must be one of"),
    ({"label_smoothing": "0.1"}, ValueError, "^label_smoothing must be a float"),
    ({"reduce_in_fp32": True}, TypeError, "unexpected keyword argument 'reduce_in_fp32'"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG, ids=str)
def test_wrong_options_are_refused_when_the_configuration_is_made(options, error, match):
    with pytest.raises(error, match=match):
        compat.LinearCrossEntropyLoss.Config(options=options)
    config = compat.LinearCrossEntropyLoss.Config()
    config.options = options
    with pytest.raises(error, match=match):
        config.build()
    trainers = llama3_debugmodel()
    trainers.override.imports = [(OURS, options)]
    with pytest.raises(error, match=match):
        apply_overrides(trainers.override, trainers)


def test_the_configuration_of_the_page():
    _, source = scripts_of(ROOT / "docs" / "torchtitan.md")
    names: dict[str, Any] = {}
    exec(compile(source, "docs/torchtitan.md", "exec"), names)
    loss = names["config"].loss.build()
    assert isinstance(loss, compat.LinearCrossEntropyLoss)
