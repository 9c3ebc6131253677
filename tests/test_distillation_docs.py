"""docs/distillation.md: its Python runs as it is printed."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from flce_dist import vocab_range
from flce_dist.reference import reference_linear_divergence
from flce_dist.testing import relative_rms, run_ranks
from tests.divergence_problem import V, problem

PAGE = (Path(__file__).parent.parent / "docs" / "distillation.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def block(word: str, **names: Any) -> dict[str, Any]:
    """Run the one block that contains ``word``; return its variables."""
    (source,) = (x for x in BLOCKS if word in x)
    exec(compile(source, f"docs/distillation.md, {word}", "exec"), names)
    return names


def test_the_function() -> None:
    given = problem(torch.float64, bias=False, ignored=0.0)
    found = block('kind="reverse_kl")\n', **given.operands)["loss"]
    expected = reference_linear_divergence(**given.operands)[0]
    assert relative_rms(found, expected) <= 1e-11


def test_a_teacher_is_cut_anew() -> None:
    whole = torch.randn(V + 10, 3)

    def one(group: Any) -> torch.Tensor:
        start, end = vocab_range(V + 10, group.rank(), 2)
        names = {"teacher_weight": whole[start:end], "vocab_size": V, "rank": group.rank()}
        return block("vocab_range(vocab_size", **names, P=2, group=group)["teacher_weight"]

    assert torch.equal(torch.cat(run_ranks(one, 2)), whole[:V])


class Body(torch.nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.table[input_ids])


def test_the_trainers_loss() -> None:
    """With what it asks of Trainer and of a model of transformers, and nothing else."""

    class Trainer:
        args = SimpleNamespace(device="cpu")
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    def model(h: int) -> Any:
        made: Any = torch.nn.Module()
        made.model, made.lm_head = Body(torch.randn(V, h)), torch.nn.Linear(h, V, bias=False)
        return made.double()

    student, teacher = model(8), model(12)
    transformers: Any = SimpleNamespace(Trainer=Trainer)
    with mock.patch.dict(sys.modules, transformers=transformers):
        trainer = block("class Distillation")["Distillation"](teacher=teacher)
    ids = torch.randint(V, (3, 7))
    labels = ids.clone()
    labels[0, 4:] = -100
    hidden, theirs = (x.model(ids).last_hidden_state[:, :-1] for x in (student, teacher))
    expected = reference_linear_divergence(
        hidden, student.lm_head.weight, theirs, teacher.lm_head.weight, labels=labels[:, 1:]
    )[0]
    counted = (labels[:, 1:] != -100).sum()
    for n in (None, counted):
        inputs = {"input_ids": ids, "labels": labels}
        found = trainer.compute_loss(student, inputs, num_items_in_batch=n)
        assert relative_rms(found, expected) <= 1e-11
    found.backward()
    assert student.lm_head.weight.grad.any() and teacher.lm_head.weight.grad is None


def test_every_block_is_python() -> None:
    assert len(BLOCKS) == 5
    for source in BLOCKS:
        compile(source, "docs/distillation.md", "exec")
