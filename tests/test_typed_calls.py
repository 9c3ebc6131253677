"""What type checkers and editors know of the public face, on the file of a user."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flce_dist
from flce_dist import parallel_style
from flce_dist.arguments import options
from flce_dist.arguments.options import KEYWORDS
from flce_dist.best import api as best
from flce_dist.hf import plug_in as hf
from flce_dist.megatron import plug_in as megatron
from tests.processes import LAST_RESORT_S, ROOT, environment

# Each line with what mypy says of it, or nothing.
USER = """
from typing import Any

import flce_dist
from flce_dist import filtered, linear_cross_entropy as loss
from torch import Tensor

x: Tensor
model: Any
loss(x, x, x, softcap=30.0, schedule="cached", impl=None)
loss(x, x, x, schedule=filtered.schedule(0.1))
loss(x, x, x, soft_cap=30.0)  # Unexpected keyword argument "soft_cap"
loss(x, x, x, schedule="inforward")  # Argument "schedule" to "linear_cross_entropy" has
flce_dist.linear_cross_entropy_with_metrics(x, x, x, vocab_range=(0, 9), token_weight=x)
flce_dist.linear_cross_entropy_with_metrics(x, x, x, vocabrange=(0, 9))  # Unexpected keyword
flce_dist.data_parallel_linear_cross_entropy(x, x, x, data_group=None, label_smoothing=0.1)
flce_dist.data_parallel_linear_cross_entropy(x, x, x, data_group=None, smoothing=1)  # Unexpected
flce_dist.data_parallel_linear_cross_entropy(x, x, x, data_group=None, sequence_dim=1)  # Unexpected
flce_dist.linear_logprob(x, x, x, over="ids", softcap=1.0)
flce_dist.linear_logprob(x, x, x, label_smoothing=0.1)  # Unexpected keyword
flce_dist.linear_logprob(x, x, x, softcap="1")  # Argument "softcap" to "linear_logprob" has
flce_dist.linear_top_k(x, x, 5, ignore_index=0, softcap=1.0)
flce_dist.linear_top_k(x, x, 5, ignoreindex=0)  # Unexpected keyword
flce_dist.linear_sample(x, x, 5, tp_invariant=True)
flce_dist.linear_sample(x, x, 5, max_counted=9)  # Unexpected keyword
flce_dist.linear_divergence(x, x, x, x, kind="jsd", skip_ignored=True)
flce_dist.linear_divergence(x, x, x, x, kind="jds")  # Argument "kind" to "linear_divergence" has
flce_dist.linear_divergence(x, x, x, x, label_smoothing=0.1)  # Unexpected keyword
flce_dist.linear_divergence_with_metrics(x, x, x, x, beta=0.1, tp_invariant=True)
flce_dist.linear_divergence_with_metrics(x, x, x, x, betta=0.1)  # Unexpected keyword
flce_dist.LinearCrossEntropy(4, 9, reduction="sum", sequence_parallel=True)
flce_dist.LinearCrossEntropy(4, 9, reduction="sums")  # Argument "reduction" to "LinearCrossEntropy"
flce_dist.LinearCrossEntropy(4, 9, vocab_range=(0, 9))  # Unexpected keyword
flce_dist.plan(x, x, x, max_logits_bytes=9, tp_size=2).logits_bytes + 1
flce_dist.plan(x, x, x, max_logit_bytes=9)  # Unexpected keyword
flce_dist.parallel_style.LinearCrossEntropyParallel(softcap=1.0)
flce_dist.parallel_style.LinearCrossEntropyParallel(accumulate_dweight=True)  # Unexpected keyword
flce_dist.megatron.use_linear_cross_entropy(model, metrics=True, reduction="sum")
flce_dist.megatron.use_linear_cross_entropy(model, vocabsize=9)  # Unexpected keyword
flce_dist.hf.use_linear_cross_entropy(model, z_loss_weight=0.1)
flce_dist.hf.use_linear_cross_entropy(model, softcap=1.0)  # Unexpected keyword
flce_dist.reference.reference_linear_cross_entropy(x, x, x, softcap=1.0)
flce_dist.reference.reference_linear_cross_entropy(x, x, x, soft_cap=1.0)  # Unexpected keyword
flce_dist.testing.run_ranks(lambda group: 1, 2)
flce_dist.linear_cross_entrpy  # Module has no attribute "linear_cross_entrpy"
"""


def test_mypy_finds_misspelt_options_in_the_file_of_a_user(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    config = ["--config-file", str(ROOT / "pyproject.toml")]  # whose cache is warm after make lint
    command = [sys.executable, "-m", "mypy", *config, str(tmp_path / "user.py")]
    done = run(command)
    said = re.findall(r"user\.py:(\d+): error: (.*)", done.stdout)
    lines = USER.splitlines()
    expected = {n: x.split("  # ")[1] for n, x in enumerate(lines, 1) if "  # " in x}
    assert {int(n) for n, _ in said} == {*expected}, done.stdout + done.stderr
    assert [x for n, x in said if expected[int(n)] not in x] == []


def run(command: list[str]) -> Any:
    limits: dict[str, Any] = {"timeout": LAST_RESORT_S, "capture_output": True, "text": True}
    return subprocess.run(command, cwd=ROOT, env=environment(), **limits)


MODULES = {
    "compat", "filtered", "hf", "megatron", "memory", "parallel_style", "reference", "testing",
}  # fmt: skip


def test_tab_shows_what_users_import_and_no_more() -> None:
    assert {*dir(flce_dist)} == {*flce_dist.__all__, *MODULES, "__version__"}
    for name in dir(flce_dist):
        assert getattr(flce_dist, name) is not None
    imported = re.findall(r"^    from flce_dist import (\w+) as \1$", source(), re.MULTILINE)
    assert {*imported} == MODULES, "what type checkers see"
    misspelt = "filterd"
    with pytest.raises(AttributeError, match="module 'flce_dist' has no attribute 'filterd'"):
        getattr(flce_dist, misspelt)


def source() -> str:
    return inspect.getsource(flce_dist)


def test_modules_are_imported_when_they_are_named() -> None:
    program = (
        "import sys, flce_dist\n"
        "names = [f'flce_dist.{x}' for x in ('hf', 'megatron', 'reference', 'testing')]\n"
        "assert not {*names} & {*sys.modules}\n"
        "assert [getattr(flce_dist, x.split('.')[1]).__name__ for x in names] == names\n"
    )
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def test_typed_keywords_have_the_types_of_the_options() -> None:
    """Each option is spelled twice: with its default, and in what functions name."""
    fields: dict[str, Any] = {x.name: x.type for x in dataclasses.fields(options.LossOptions)}
    typed = [x for x in vars(options).values() if hasattr(x, "__optional_keys__")]
    assert len(typed) > 10
    for kind in typed:
        assert {name: fields[name] for name in kind.__annotations__} == kind.__annotations__


@pytest.mark.parametrize(("typed", "refused"), [
    (options.CallOptions, ()),
    (options.LayerOptions, ("vocab_size", "vocab_range")),
    (options.StyleOptions, parallel_style._FIXED),
    (options.MegatronOptions, megatron._FIXED),
    (options.TransformersOptions, hf._FIXED),
    (options.TopKOptions, best._FIXED),
    (options.SampleOptions, [*best._FIXED, "ignore_index", "max_counted"]),
    (options.DataParallelOptions,
     ("reduction", "sequence_parallel", "sequence_dim", "reduce_dhidden")),
    (options.DivergenceOptions, ("label_smoothing", "z_loss_weight")),
    (options.ScoreOptions, ("reduction", "ignore_index", "label_smoothing", "z_loss_weight",
                            "max_counted", "skip_ignored")),
])  # fmt: skip
def test_typed_keywords_are_those_that_are_accepted(typed: Any, refused: Any) -> None:
    assert {*typed.__annotations__} == {*KEYWORDS} - {*refused}
