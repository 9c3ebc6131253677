"""docs/distillation.md: its Python runs as it is printed."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flce_dist import vocab_range
from flce_dist.reference import reference_linear_divergence
from flce_dist.testing import relative_rms, run_ranks
from tests.divergence_problem import V

PAGE = (Path(__file__).parent.parent / "docs" / "distillation.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def block(word: str, **names: Any) -> dict[str, Any]:
    """Run the one block that contains ``word``; return its variables."""
    (source,) = (x for x in BLOCKS if word in x)
    exec(compile(source, f"docs/distillation.md, {word}", "exec"), names)
    return names


def test_the_function() -> None:
    made = block('kind="reverse_kl")\n')
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    operands = {name: made[name].detach().double() for name in names}
    expected = reference_linear_divergence(**operands)[0]
    assert relative_rms(made["loss"], expected) <= 1e-4
    assert made["hidden"].grad is not None and made["weight"].grad is not None


def test_a_teacher_is_cut_anew() -> None:
    whole, weight = torch.randn(V + 10, 3), torch.randn(V, 5)
    hidden, teacher_hidden = torch.randn(8, 5), torch.randn(8, 3)

    def one(group: Any) -> dict[str, Any]:
        start, end = vocab_range(V + 10, group.rank(), 2)
        names = {"teacher_weight": whole[start:end], "vocab_size": V, "rank": group.rank()}
        names |= {"weight": weight[slice(*vocab_range(V, group.rank(), 2))]}
        names |= {"hidden": hidden, "teacher_hidden": teacher_hidden}
        return block("vocab_range(vocab_size", **names, P=2, group=group)

    found = run_ranks(one, 2)
    assert torch.equal(torch.cat([x["teacher_weight"] for x in found]), whole[:V])
    operands = (x.double() for x in (hidden, weight, teacher_hidden, whole[:V]))
    expected = reference_linear_divergence(*operands)[0]
    assert all(relative_rms(x["loss"], expected) <= 1e-4 for x in found)


class Model(torch.nn.Module):
    """What the page asks of a model of transformers: the last hidden states, and the head."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(V, H))
        self.lm_head = torch.nn.Linear(H, V, bias=False)

    def forward(self, input_ids: torch.Tensor, **asked: Any) -> SimpleNamespace:
        assert asked == {"output_hidden_states": True, "logits_to_keep": 1}
        return SimpleNamespace(hidden_states=(None, self.table[input_ids]))

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.lm_head


class Wrapped(torch.nn.Module):
    """As DDP: gradients are averaged only if its own forward ran."""

    def __init__(self, module: Model) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_trainers_loss(processes: int) -> None:
    """The mean over processes of their losses is that of all labels; DDP's forward runs."""

    class Trainer:
        args = SimpleNamespace(device="cpu")
        accelerator = SimpleNamespace(
            unwrap_model=lambda model: model.module, num_processes=processes
        )

    student, teacher = Wrapped(Model(8).double()), Model(12).double()
    transformers: Any = SimpleNamespace(Trainer=Trainer)
    with mock.patch.dict(sys.modules, transformers=transformers):
        trainer = block("class Distillation")["Distillation"](teacher=teacher)
    ids = torch.randint(V, (4, 7))
    labels = ids.clone()
    labels[0, 4:] = -100
    hidden, theirs = (x.table[ids][:, :-1] for x in (student.module, teacher))
    expected = reference_linear_divergence(
        hidden, student.module.lm_head.weight, theirs, teacher.lm_head.weight, labels=labels[:, 1:]
    )[0]
    counted = (labels[:, 1:] != -100).sum()
    parts = zip(ids.chunk(processes), labels.chunk(processes), strict=True)
    losses = [
        trainer.compute_loss(
            student, {"input_ids": x, "labels": y}, return_outputs=True, num_items_in_batch=counted
        )
        for x, y in parts
    ]
    loss = torch.stack([x for x, _ in losses]).mean()
    assert relative_rms(loss, expected) <= 1e-11
    assert student.calls == processes and all(outputs == {} for _, outputs in losses)
    loss.backward()
    learned = student.module.lm_head.weight.grad
    assert learned is not None and learned.any() and teacher.lm_head.weight.grad is None
    if processes == 1:
        alone = trainer.compute_loss(student, {"input_ids": ids, "labels": labels})
        assert relative_rms(alone, expected) <= 1e-11


def test_every_block_is_python() -> None:
    assert len(BLOCKS) == 5
    for source in BLOCKS:
        compile(source, "docs/distillation.md", "exec")
