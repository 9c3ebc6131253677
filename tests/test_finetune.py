"""``launch.finetune`` on CPU: a step of a tiny model, without the plug-in and with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist.launch.finetune import __main__ as finetune
from flce_dist.launch.finetune.config import FinetuneConfig, RunSpec, load_config
from flce_dist.launch.program import RunError
from flce_dist.launch.yaml_config import ConfigError

TINY = """
device: cpu
dtype: fp32
hidden_size: 32
ffn_hidden_size: 48
num_layers: 1
num_heads: 4
num_kv_heads: 2
vocab_size: 98
batch_size: 2
seq_length: 12
prompt_tokens: 4
rank: 2
warmup: 1
rounds: 2
steps: 1
runs:
  - {plug_in: false}
  - {plug_in: true}
  - {plug_in: false, adapts_head: true}
  - {plug_in: true, adapts_head: true}
"""


def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return ["--config", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "found.v1")]


def with_libraries() -> None:
    for name in finetune.LIBRARIES:
        pytest.importorskip(name)


def test_steps_are_measured_without_the_plug_in_and_with_it(tmp_path, capsys):
    with_libraries()
    assert finetune.main(arguments(tmp_path)) == 0
    found = json.loads((tmp_path / "found.v1.json").read_text())
    records = found["records"]
    runs = [(r["impl"], r["adapts_head"]) for r in records]
    ways = "transformers", "flce_dist"
    assert runs == [(impl, adapts) for adapts in (False, True) for impl in ways]
    for r in records:
        assert r["T"] == 24 and r["V"] == 98 and r["status"] == "ok" and r["mode"] == "step"
        assert 0 < r["p20_ms"] <= r["p50_ms"] <= r["p80_ms"] and r["peak_mib"] > 0
        assert r["loss_error"] <= 1e-5
    assert [r["ratio"] for r in records if r["impl"] == "transformers"] == [1.0, 1.0]
    assert found["about"]["peers"].keys() == {"transformers", "peft"}
    assert found["about"]["config"]["seq_length"] == 12
    printed = capsys.readouterr().out
    assert "a fine-tuning step" in printed and "found.v1.json" in printed


def test_the_plug_in_makes_the_loss_of_its_runs_alone(tmp_path, monkeypatch):
    """And a loss that differs is a failure."""
    with_libraries()
    from flce_dist.hf import layers

    called: list[float] = []

    def off(*args: Any, **options: Any) -> torch.Tensor:
        loss = original(*args, **options) * 1.01
        called.append(loss.item())
        return loss

    original = layers.linear_cross_entropy
    monkeypatch.setattr(layers, "linear_cross_entropy", off)
    assert finetune.main(arguments(tmp_path)) == 1
    found = json.loads((tmp_path / "found.v1.json").read_text())["records"]
    wrong = [r["impl"] for r in found if r["status"] == "wrong"]
    assert wrong == ["flce_dist", "flce_dist"]
    steps = 1 + 1 + 2 * (1 + 1)  # warming up, memory, samples behind one that is not timed
    assert len(called) == 2 * steps


@pytest.mark.parametrize(("loss", "status"), [(11.5, "ok"), (float("nan"), "wrong")])
def test_a_run_without_another_to_compare_with_has_a_loss_at_least(loss, status):
    """Its first step's."""
    run = finetune.Measured(RunSpec(), lambda: torch.zeros(()), loss=loss, samples_ms=[1.0])
    (record,) = finetune._records([run], FinetuneConfig())
    assert record["status"] == status and record["loss_error"] is None


def test_a_run_is_compared_with_the_one_that_adapts_the_same_layers():
    runs = [
        finetune.Measured(RunSpec(plug_in, adapts_head), torch.empty, loss=loss, samples_ms=[ms])
        for plug_in, adapts_head, loss, ms in (
            (False, False, 10.0, 8.0), (True, False, 10.0, 4.0),
            (False, True, 20.0, 9.0), (True, True, 20.2, 3.0),
        )
    ]  # fmt: skip
    found = finetune._records(runs, FinetuneConfig())
    assert [x["ratio"] for x in found] == [1.0, 0.5, 1.0, 3.0 / 9.0]
    assert [x["loss_error"] for x in found] == pytest.approx([0.0, 0.0, 0.0, 0.01])
    assert [x["status"] for x in found] == ["ok", "ok", "ok", "wrong"]


def test_several_ranks_are_refused(tmp_path, monkeypatch):
    """Each would write the same file."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RunError, match="got 2 ranks: start it without torchrun"):
        finetune.main(["--out", str(tmp_path / "x"), "--device", "cpu"])


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RunError, match=r"^a fine-tuning step needs transformers: pip install transformers peft$"
    ):
        finetune.main(arguments(tmp_path))


@pytest.mark.parametrize("args, message", [
    (["--num-heads", "3"], "^num_heads must divide by num_kv_heads 2, got 3$"),
    (["--num-heads", "6"], "^hidden_size must divide by twice num_heads 6, got 32$"),
    (["--prompt-tokens", "12"], "^prompt_tokens must be below seq_length 12, got 12$"),
    (["--rounds", "0"], "^rounds must be an int within"),
    (["--seq-length", "1"], "^seq_length must be at least 2, got 1$"),
    (["--vocab-size", "1"], "^vocab_size must be at least 2, got 1$"),
    (["--adapted", "q_proj", "query"], "^adapted must name some of q_proj, .*, got .*'query'"),
    (["--adapted"], r"^adapted must name some of q_proj, .*, got \(\)$"),
])  # fmt: skip
def test_wrong_values(tmp_path, args, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*arguments(tmp_path), *args])


def test_the_grid_is_read():
    grid = Path(__file__).parent.parent / "configs" / "finetune" / "lora.yaml"
    config = load_config(["--config", str(grid)])
    assert len(config.runs) == 4 and config.size["T"] == 8192
    assert config.adapted == FinetuneConfig().adapted
