"""The plug-in on two gloo ranks: DDP, tensor parallelism by transformers' own plan, FSDP2."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

pytest.importorskip("transformers")

import transformers

from flce_dist.hf import NO_LOGITS, use_linear_cross_entropy
from tests.contract.compare import compare
from tests.hf_models import VOCAB, batch, gradients, ours, real_logits, step, theirs
from tests.on_ranks import on_ranks
from tests.test_hf import BUDGET

RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])
IS_5 = RELEASE[0] >= 5
EXPERTS = pytest.param(
    "mixtral, auxiliary loss",
    marks=pytest.mark.skipif(
        IS_5 and torch.__version__ < "2.13",
        reason="needs torch 2.13: before, experts that transformers 5 splits cannot be gathered",
    ),
)


def of_rank(group: Any) -> dict[str, Any]:
    """This rank's row of the batch."""
    rank = group.rank()
    return {name: x[rank : rank + 1] for name, x in batch(group.size()).items()}


def averaged(model: Any, group: Any) -> dict[str, Any]:
    """The step that DDP and FSDP2 make: the mean of the ranks' gradients; this rank's loss."""
    expected = step(model, **of_rank(group))
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= group.size()
    return {"loss": expected["loss"], **gradients(model)}


@pytest.mark.parametrize("kind", ["qwen3, tied", "gemma2, softcap"])
@on_ranks(2)
def test_ddp(group, kind):
    model = theirs(kind)
    expected = averaged(model, group)
    options: Any
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        wrapped = nn.parallel.DistributedDataParallel(ours(model), **options)
        with real_logits() as made:
            found = step(wrapped, **of_rank(group))
        assert made == []
        compare({name.removeprefix("module."): x for name, x in found.items()}, expected, BUDGET)


def shard(model: Any, how: str) -> Any:
    *layers, last = model.model.layers
    for layer in (*layers, last):
        fully_shard(layer)
    if how == "head":
        fully_shard(model.lm_head)  # gathered for the layer's own calls alone
    if how == "norm and head":  # as transformers groups them
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    if how == "embedding and head":
        fully_shard([model.model.embed_tokens, model.lm_head], reshard_after_forward=False)
    return fully_shard(model)


@pytest.mark.parametrize(("kind", "how"), [
    ("llama", "root"),
    ("llama", "head"),
    ("gemma2, softcap", "root"),
    ("cohere, product", "norm and head"),
    ("qwen3, tied", "root"),
    ("qwen3, tied", "embedding and head"),
    ("mixtral, auxiliary loss", "norm and head"),
])  # fmt: skip
@on_ranks(2)
def test_fsdp2(group, kind, how):
    given: dict[str, Any] = {} if "tied" in kind else {"tie_word_embeddings": False}
    model = theirs(kind, **given)
    expected, before = averaged(model, group), model(**of_rank(group)).logits
    plugged = shard(ours(model), how)
    for given in ({}, {}, {"logits": True}):
        with real_logits() as made:
            found = step(plugged, **of_rank(group), **given)
        assert len(made) == len(given)
        compare(found, expected, BUDGET)
    torch.testing.assert_close(plugged(input_ids=of_rank(group)["input_ids"]).logits, before)
    ids, given = of_rank(group)["input_ids"], {"max_new_tokens": 2, "do_sample": False}
    if kind == "llama":
        assert torch.equal(plugged.generate(ids, **given), model.generate(ids, **given))


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16, None], ids=str)
@on_ranks(2)
def test_fsdp2_casts_its_output(group, output):
    """The cast finds no logits to cast, and casts those that were asked for."""
    model = theirs("gemma2, softcap")
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output)
    plugged = ours(model)
    for one in (plugged, model):
        for layer in one.model.layers:
            fully_shard(layer, mp_policy=inner)
        fully_shard(one, mp_policy=outer)
    with real_logits() as made:
        found = plugged(**of_rank(group))
        found.loss.backward()
    assert made == [] and found.logits is NO_LOGITS
    expected = model(**of_rank(group))
    logits = plugged(**of_rank(group), logits=True).logits
    assert logits.dtype == expected.logits.dtype and torch.equal(logits, expected.logits)


@pytest.mark.parametrize("how", ["FSDP2", "FSDP2, the head by itself", "tensor parallel"])
@on_ranks(2)
def test_logits_are_read_late_and_on_one_rank_alone(group, how, tmp_path):
    """After backward and the optimizer's step: no collective, and those of the forward."""
    model = theirs()
    expected = model(**batch()).logits.detach()
    if how == "tensor parallel":
        plugged = use_linear_cross_entropy(loaded("llama", tmp_path, group, tp_size=2))
    else:
        plugged = shard(ours(model), "head" if "itself" in how else "root")
    out = plugged(**batch(), logits=True)
    (out.loss + 0.1 * out.logits.exp().mean()).backward()
    torch.optim.SGD(plugged.parameters(), lr=0.5).step()
    if group.rank() == 0:
        torch.testing.assert_close(out.logits.detach(), expected, atol=1e-4, rtol=1e-4)


def loaded(kind: str, folder: Any, group: Any, **parallel: int) -> Any:
    """The model as transformers loads it over the ranks."""
    if group.rank() == 0:
        theirs(kind).save_pretrained(folder)
    dist.barrier()
    os.environ["LOCAL_RANK"] = str(group.rank())
    given: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    if IS_5:
        from transformers.distributed import DistributedConfig

        given["distributed_config"] = DistributedConfig(**parallel)
    else:
        given["tp_plan"] = "auto"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given).train()


@pytest.mark.parametrize(
    "kind",
    ["llama", "gemma2, softcap", "granite, quotient", "qwen3, tied", EXPERTS]
    + ["phi, bias"] * IS_5,  # 4 fails with biases
)
@on_ranks(2)
def test_tensor_parallel(group, kind, tmp_path):
    model = theirs(kind)
    split = loaded(kind, tmp_path, group, tp_size=2)
    # Version 4 splits layers alone.
    assert isinstance(split.get_output_embeddings().weight, DTensor) == IS_5
    expected = step(split)
    use_linear_cross_entropy(split)
    found = step(split)
    with real_logits() as whole, real_logits(VOCAB // 2) as parts:
        assert split(**batch()).logits is NO_LOGITS
    assert whole == parts == []
    compare(found, expected, BUDGET)
    compare({"loss": found["loss"]}, {"loss": step(model)["loss"]}, BUDGET)
    logits = {"logits": split(**batch(), logits=True).logits.detach()}
    compare(logits, {"logits": model(**batch()).logits.detach()}, BUDGET)


@pytest.mark.parametrize("output", [Replicate(), Shard(-1)], ids=str)
@on_ranks(2)
def test_a_head_that_torch_has_split(group, output):
    """By ``parallelize_module``, whose hooks are for logits alone."""
    model = theirs()
    mesh = init_device_mesh("cpu", (2,))
    plan: Any = {"lm_head": ColwiseParallel(output_layouts=output, use_local_output=False)}
    split = parallelize_module(ours(model), mesh, plan)
    with real_logits() as whole, real_logits(VOCAB // 2) as parts:
        found = step(split)
    assert whole == parts == []
    expected = step(model)
    compare(found, expected, BUDGET)
    asked = split(**batch(), logits=True)
    torch.testing.assert_close(asked.logits.full_tensor(), model(**batch()).logits)
    torch.testing.assert_close(asked.loss.detach(), expected["loss"])


@pytest.mark.skipif(not IS_5, reason="needs transformers 5, whose plan includes FSDP2")
@pytest.mark.parametrize("kind", ["llama", "qwen3, tied"])
@on_ranks(2)
def test_fsdp2_by_their_plan(group, kind, tmp_path):
    model = theirs(kind)
    plugged = use_linear_cross_entropy(loaded(kind, tmp_path, group, fsdp_size=2))
    compare(step(plugged, **of_rank(group)), averaged(model, group), BUDGET)


@pytest.mark.skipif(RELEASE < (5, 18), reason="needs transformers 5.18: 5.17 cannot load it")
@on_ranks(4)
def test_fsdp2_over_tensor_parallel(group, tmp_path):
    """Ranks 0 and 1 share the first row of the batch, 2 and 3 the second."""
    model, row = theirs("llama"), slice(group.rank() // 2, group.rank() // 2 + 1)
    split = loaded("llama", tmp_path, group, tp_size=2, fsdp_size=2)
    mine = {name: x[row] for name, x in batch().items()}
    found = step(use_linear_cross_entropy(split), **mine)
    expected = [step(model, **{name: x[i : i + 1] for name, x in batch().items()}) for i in (0, 1)]
    mean = {name: (expected[0][name] + expected[1][name]) / 2 for name in expected[0]}
    compare(found, {**mean, "loss": expected[group.rank() // 2]["loss"]}, BUDGET)
