"""``launch.train`` beside a loop of plain PyTorch: a GPT with logits, autograd, AdamW, in fp64.

The loop shares the first weights and the tokens with the run, and no code with it.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked
pytest.importorskip("tyro")

from flce_dist.launch.train.checkpoint import newest_whole
from flce_dist.launch.train.config import HeadConfig, OptimizerConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.run import Trainer, run
from flce_dist.testing import relative_rms
from tests.tiny_training import CONFIG, corpus, forget_earlier_runs, records

RATES = [0.01, 0.02, 0.0155, 0.0065, 0.002, 0.002]
"""Of each step: two of warmup to 0.02, a cosine's half turn to 0.002 in three, then flat."""
STEPS = len(RATES)
Weights = dict[str, Tensor]


def logits_of(weights: Weights, tokens: Tensor, config: RunConfig) -> Tensor:
    """A GPT without biases: RMSNorm before each part, rotary embeddings, exact GELU."""
    b, s = tokens.shape
    n = config.model.num_heads
    d = config.model.hidden_size // n
    frequencies = 10_000.0 ** -(torch.arange(0, d, 2).double() / d)
    angles = torch.arange(s)[:, None, None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)  # [s, 1, d / 2]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[name]

    def rotated(x: Tensor) -> Tensor:
        """Pairs are a feature of the first half and its like in the second."""
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    x = weights["embedding.word_embeddings.weight"][tokens]
    future = torch.ones(s, s, dtype=torch.bool).triu(1)
    for i in range(config.model.num_layers):
        layer = f"decoder.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm.weight")
        y = y @ weights[f"{layer}.self_attention.linear_qkv.weight"].T
        q, k, v = y.view(b, s, n, 3, d).unbind(3)
        scores = torch.einsum("bsnd,btnd->bnst", rotated(q), rotated(k)) / math.sqrt(d)
        p = scores.masked_fill(future, -math.inf).softmax(-1)
        y = torch.einsum("bnst,btnd->bsnd", p, v).flatten(2)
        x = x + y @ weights[f"{layer}.self_attention.linear_proj.weight"].T
        y = norm(x, f"{layer}.pre_mlp_layernorm.weight")
        y = F.gelu(y @ weights[f"{layer}.mlp.linear_fc1.weight"].T)
        x = x + y @ weights[f"{layer}.mlp.linear_fc2.weight"].T
    x = norm(x, "decoder.final_layernorm.weight")
    tied = config.model.tie_embeddings
    return x @ weights["embedding.word_embeddings.weight" if tied else "output_layer.weight"].T


def loss_of(weights: Weights, tokens: Tensor, labels: Tensor, config: RunConfig) -> Tensor:
    logits = logits_of(weights, tokens, config).flatten(0, 1) * config.head.logit_scale
    if config.head.softcap is not None:
        logits = config.head.softcap * (logits / config.head.softcap).tanh()
    loss = F.cross_entropy(
        logits, labels.flatten(), label_smoothing=config.head.label_smoothing, ignore_index=-100
    )
    squares = logits.logsumexp(-1).square()[labels.flatten() != -100]
    return loss + config.head.z_loss_weight * squares.mean()


def plain_run(first: Weights, config: RunConfig) -> tuple[list[float], Weights]:
    """Return the loss of each step and the validation loss at the end, and the weights then."""
    texts = replace(corpus(), prompt_tokens=config.data.prompt_tokens)
    weights = {name: x.double().requires_grad_() for name, x in first.items()}
    rate = config.optimizer
    decayed = [x for x in weights.values() if x.dim() > 1]
    others = [x for x in weights.values() if x.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    betas = rate.beta1, rate.beta2
    adamw = torch.optim.AdamW(groups, rate.lr, betas, weight_decay=rate.weight_decay)
    size = config.data.batch_size
    batches = config.data.microbatches
    losses = []
    for step in range(STEPS):
        total = 0.0
        for i in range(batches):
            tokens, labels = texts.train_batch((step * batches + i) * size, size)
            loss = loss_of(weights, tokens, labels, config) / batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(list(weights.values()), rate.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = RATES[step]
        adamw.step()
        adamw.zero_grad()
    with torch.no_grad():
        losses.append(loss_of(weights, *texts.validation_batch(0, size), config).item())
    return losses, {name: x.detach() for name, x in weights.items()}


def rank_run(group: Any, config: RunConfig) -> Weights:
    """Run as ``launch.train`` does; return the weights that it started from."""
    texts = replace(corpus(), prompt_tokens=config.data.prompt_tokens)
    cpu = torch.device("cpu")
    forget_earlier_runs()
    first = {x: w.detach().clone() for x, w in Trainer(config, texts, cpu).model.named_parameters()}
    forget_earlier_runs()
    assert run(config, texts, cpu) == 0
    return first


HEADS = {
    "plain": HeadConfig(),
    "options": HeadConfig(
        label_smoothing=0.1, z_loss_weight=1e-2, softcap=3.0, logit_scale=0.5, skip_ignored=True
    ),
    "in_forward": HeadConfig(schedule="in_forward"),
    "megatron": HeadConfig(kind="megatron_unfused"),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_run_is_that_of_a_plain_loop(pools, tmp_path, head):
    config = replace(
        CONFIG,
        steps=STEPS, validate_every=STEPS, checkpoint_every=STEPS, out_dir=tmp_path, compare=False,
        parallel=ParallelConfig(tensor=1),
        head=HEADS[head],
        model=replace(CONFIG.model, num_layers=2, tie_embeddings=head != "plain"),
        data=replace(CONFIG.data, microbatches=2, prompt_tokens=3 if head == "options" else 0),
        optimizer=OptimizerConfig(
            lr=0.02, min_lr=0.002, warmup_steps=2, decay_steps=5, clip_norm=0.7
        ),
    )  # fmt: skip
    (first,) = pools[1].run(rank_run, config)
    losses = [record["loss"] for record in records(tmp_path)]
    checkpoint = newest_whole(tmp_path / "checkpoints", print)
    assert checkpoint is not None
    state = checkpoint.load(0)
    weights = {x.removeprefix("model."): state[x] for x in state if x.startswith("model.")}

    expected, exact = plain_run(first, config)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert weights.keys() == exact.keys() == first.keys()
    for name, weight in exact.items():
        change = weights[name].double() - first[name]
        # The same loop in fp32 is off by up to 3e-6.
        assert relative_rms(change, weight - first[name]) < 3e-5, name
