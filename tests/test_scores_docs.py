"""The recipes of docs/scores.md, as they are printed, against dense PyTorch in fp64."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist import linear_top_k
from flce_dist.testing import relative_rms

PAGE = (Path(__file__).parent.parent / "docs" / "scores.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
T, V, H, K = 12, 40, 16, 4


def block(word: str, **names: Any) -> dict[str, Any]:
    """Run the one block that contains ``word``; return its variables."""
    (source,) = (x for x in BLOCKS if word in x)
    exec(compile(source, f"docs/scores.md, {word}", "exec"), names)
    return names


def recipe(name: str) -> Callable[..., Tensor]:
    (source,) = re.findall(rf"^```python\n(def {name}\(.*?)^```$", PAGE, re.M | re.S)
    names = block("import linear_logprob, linear_top_k")
    exec(compile(source, f"docs/scores.md, {name}", "exec"), names)
    return names[name]


def leaves() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=g, dtype=torch.float64) for n in (T, V))
    return hidden.requires_grad_(), weight.requires_grad_()


def check(of_recipe: Callable[..., Tensor], dense: Callable[..., Tensor]) -> None:
    """Compare loss and gradients."""
    found = []
    for call in (of_recipe, dense):
        hidden, weight = leaves()
        loss = call(hidden, weight)
        loss.backward()
        found.append((loss, hidden.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None
        assert relative_rms(ours, theirs) <= 1e-11


def masked(logits: Tensor, ids: Tensor) -> Tensor:
    named = torch.zeros(T, V + 1, dtype=torch.bool).scatter_(1, ids % (V + 1), True)[:, :V]
    return logits.where(named, -torch.inf).log_softmax(-1)


def policy_loss(logprob: Tensor, chosen: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The clipped ratio of the ``chosen`` ids, less a hundredth of the entropy."""
    entropy = -(logprob.exp() * logprob.clamp_min(-1e30)).sum(-1)
    ratio = (logprob[torch.arange(T), chosen] - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (policy - 0.01 * entropy).mean()


def test_every_recipe_is_tested() -> None:
    tested = "ppo_loss", "candidate_kl", "preference_loss", "grpo_loss", "top_k_kl", "distil_top_k"
    assert set(re.findall(r"^def (\w+)", PAGE, re.M)) == {*tested}


def test_scores() -> None:
    made = block("with_entropy=True)\n")
    found = made["scores"]
    logprob = (made["hidden"].double() @ made["weight"].double().T).log_softmax(-1)
    assert relative_rms(found.logprob, logprob.gather(1, made["ids"])) <= 1e-5
    assert relative_rms(found.entropy, -(logprob.exp() * logprob).sum(-1)) <= 1e-5


def test_best_ids_ranks_and_samples() -> None:
    """The block goes on where the page's first one ends."""
    before = block("with_entropy=True)\n")
    # In eighths products and their sums are exact: logits are the same in any order of additions.
    before |= {name: (8 * before[name]).round() / 8 for name in ("hidden", "weight")}
    found = block("import linear_sample", **before)
    logits = (found["hidden"] @ found["weight"].T).detach()
    labels = found["labels"]
    order = logits.sort(descending=True, stable=True).indices
    assert torch.equal(found["best"].ids, order[:, :64])
    assert torch.equal(found["rank"], (order == labels[:, None]).int().argmax(-1))
    logprob = logits.log_softmax(-1).gather(-1, found["drawn"][:, None])[:, 0]
    assert relative_rms(found["logprob"], logprob) <= 1e-6


def test_ratio_over_the_vocabulary() -> None:
    g = torch.Generator().manual_seed(3)
    sampled = torch.randint(V, (T,), generator=g)
    old, advantage = (torch.randn(T, generator=g, dtype=torch.float64) for _ in range(2))

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        logprob = (hidden @ weight.T / 0.7).log_softmax(-1)
        return policy_loss(logprob, sampled, old, advantage)

    grpo = recipe("grpo_loss")
    check(lambda h, w: grpo(h, w, sampled, old, advantage, 0.7, 0.01), dense)


@pytest.mark.parametrize("padded", [False, True])
def test_distillation_of_a_top_k_with_the_rest(padded: bool) -> None:
    """Padding is that of ``linear_top_k``: after a nucleus, and where a token has no ids."""
    g = torch.Generator().manual_seed(4)
    of_teacher = torch.randn(T, V, generator=g, dtype=torch.float64).log_softmax(-1)
    teacher, ids = of_teacher.topk(K)
    kept = torch.ones(T, K, dtype=torch.bool)
    if padded:
        kept[0], kept[1, 1:] = False, False

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        p, named = (hidden @ weight.T).softmax(-1), torch.zeros(T, V, dtype=torch.bool)
        named.scatter_(1, ids, kept)
        rest, q = of_teacher.exp().where(~named, 0.0).sum(-1), p.where(~named, 0.0).sum(-1)
        each = teacher.exp() * (teacher - p.gather(1, ids).log())
        each = each.where(kept, 0.0).sum(-1) + rest * (rest.log() - q.log())
        return each.where(kept[:, 0], 0.0).mean()

    kl = recipe("top_k_kl")
    found, at = ids.where(kept, -1), teacher.where(kept, -torch.inf)
    check(lambda h, w: kl(h, w, found, at), dense)


@pytest.mark.parametrize("top_p", [None, 0.3])
def test_a_teachers_top_k_reaches_the_student(top_p: float | None) -> None:
    """As verl's forward KL at the teacher's ids, and NeMo-RL's, which renormalises both."""
    g = torch.Generator().manual_seed(6)
    operands = [torch.randn(n, 2 * H, generator=g, dtype=torch.float64) / H**0.25 for n in (T, V)]
    logprob = (operands[0] @ operands[1].T / 0.7).log_softmax(-1)
    target, ids = logprob.sort(descending=True)
    target, ids = target[:, :K], ids[:, :K]
    if top_p is not None:
        kept = target.exp().cumsum(-1) - target.exp() < top_p
        assert not kept.all() and kept[:, 1].any()
        target = target.where(kept, -torch.inf)

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        student = (hidden @ weight.T / 0.7).log_softmax(-1).gather(-1, ids)
        each = target.exp() * (target.clamp_min(-1e30) - student)
        return each.sum(-1).mean()

    distil = recipe("distil_top_k")
    check(lambda h, w: distil(h, w, *operands, K, top_p, 0.7), whole)

    def renormalised(hidden: Tensor, weight: Tensor) -> Tensor:
        student = (hidden @ weight.T).gather(-1, ids).where(target > -torch.inf, -torch.inf)
        p, student = target.softmax(-1), student.log_softmax(-1)
        return (p * (p.log() - student).where(p > 0, 0.0)).sum(-1).mean()

    best = linear_top_k(operands[0], operands[1], K, top_p=top_p, temperature=0.7)
    candidates = recipe("candidate_kl")
    check(lambda h, w: candidates(h, w, best.ids, best.logprob), renormalised)


def test_ppo_over_a_samplers_mask() -> None:
    g = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 7, (T,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    rows = [torch.randperm(V, generator=g)[:n] for n in counts.tolist()]
    old, advantage = (torch.randn(T, generator=g, dtype=torch.float64) for _ in range(2))
    temperature = torch.rand(T, generator=g) + 0.5
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        logprob = masked(hidden @ weight.T / temperature[:, None], padded)
        return policy_loss(logprob, padded[:, 0], old, advantage)

    ppo = recipe("ppo_loss")
    ids, chosen = torch.cat(rows), offsets[:-1]
    check(lambda h, w: ppo(h, w, ids, offsets, chosen, old, advantage, temperature, 0.01), dense)


def test_distillation_within_candidates() -> None:
    g = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(T)])
    ids[3, 2:] = -1
    teacher = torch.randn(T, K, generator=g, dtype=torch.float64).where(ids >= 0, -torch.inf)

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        target = teacher.softmax(-1)
        logprob = masked(hidden @ weight.T, ids).gather(1, ids.clamp_min(0))
        kl = torch.special.xlogy(target, target) - target * logprob.where(ids >= 0, 0.0)
        return kl.sum(-1).mean()

    kl = recipe("candidate_kl")
    check(lambda h, w: kl(h, w, ids, teacher), dense)


def test_preference() -> None:
    ids = torch.stack([torch.arange(T), torch.arange(T) + 20], 1)

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.T).gather(1, ids)
        return -F.logsigmoid(0.3 * (logits[:, 0] - logits[:, 1])).mean()

    preference = recipe("preference_loss")
    check(lambda h, w: preference(h, w, ids, 0.3), dense)
