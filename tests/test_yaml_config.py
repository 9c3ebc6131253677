"""Strict YAML, numbers out of range; the configuration of a training run."""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import yaml

pytest.importorskip("tyro")

from flce_dist.arguments.options import LossOptions
from flce_dist.launch.bench import config
from flce_dist.launch.train.config import (
    MAY_CHANGE_ON_RESUME,
    HeadConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    flatten,
    load_config,
    resume_conflicts,
)
from flce_dist.launch.train.optimizer import learning_rate
from flce_dist.launch.verify.__main__ import Settings
from flce_dist.launch.yaml_config import ConfigError, read_yaml


def from_yaml(folder: Path, text: str | bytes, *overrides: str, load: Any = load_config) -> Any:
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(["--config", str(path), *overrides], world_size=2)


def test_yaml_gives_values_and_the_command_line_overrides_them(tmp_path):
    text = "steps: 7\nmodel:\n  hidden_size: 64\n  num_heads: 2\noptimizer:\n  lr: 1\n"
    found = from_yaml(tmp_path, text, "--model.hidden-size", "96", "--head.softcap", "30")
    assert (found.steps, found.model.hidden_size, found.model.num_heads) == (7, 96, 2)
    assert found.head.softcap == 30.0
    assert found.optimizer.lr == 1.0 and isinstance(found.optimizer.lr, float)
    assert found.model.num_layers == RunConfig().model.num_layers


@pytest.mark.parametrize("text, message", [
    ("model:\n  hiden_size: 64", r"unknown key model\.hiden_size; did you mean model\.hidde"),
    ("zzz: 1", "unknown key zzz; known: out_dir, steps"),
    ("steps: true", r"steps must be int, got True"),
    ("optimizer:\n  lr: 1e-3", r"optimizer\.lr must be float, got '1e-3'; .*write 1\.0e-3"),
    ("head:\n  schedule: fast", r"head\.schedule must be one of auto, .*got 'fast'"),
    ("model: 3", r"model must hold keys and values, got 3"),
    ("steps: 1\nmodel: [", r"run\.yaml:2: must be YAML: .*expected the node content"),
    ("optimizer:\n  lr: 1.0\n  lr: 2.0", r"run\.yaml:3: .* key lr is given twice, .* line 2$"),
    ("seed: 1\nsteps: 2026-13-01", r"run\.yaml:2: .*'2026-13-01' cannot be read: month must"),
    ("seed: 1\nsteps: \0", r"run\.yaml:2: must be YAML: special characters are not allowed"),
    (b"seed: 1\nout_dir: \xff", r"run\.yaml:2: must be UTF-8, got byte 0xff"),
    ("optimizer:\n  lr: 1" + "0" * 400, r"optimizer\.lr must be float, got 1000"),
    ("steps: !!python/tuple []", r"run\.yaml:1: must be YAML: could not determine a constr"),
    ("[" * 1000, r"run\.yaml must be YAML of a few levels"),
    ("steps: [&a [1, 1], &b [*a, *a], &c [*b, *b], &d [*c, *c], &e [*d, *d], &f [*e, *e]]",
     r"steps must be int, got \[\[1, 1\], .*\.\.\."),
    ("[]", r"the top level must hold keys and values, got \[\]"),
    ("model.hidden_size: 3", r"unknown key model\.hidden_size; write hidden_size below model"),
    ("out_dir: ''", r"out_dir must be a path, got ''"),
    ("out_dir: 3", r"out_dir must be a path, got 3"),
    ("shapes: 3", r"shapes must be a list, got 3"),
    ("shapes: [{T: 1}, {t: 1}]", r"unknown key shapes\[1\]\.t; known: T, H, V"),
    ("shapes: [{}, {T: x}]", r"shapes\[1\]\.T must be int, got 'x'"),
])  # fmt: skip
def test_wrong_yaml(tmp_path, text, message):
    of_bench = str(text).startswith("shapes")
    with pytest.raises(ConfigError, match=message) as error:
        from_yaml(tmp_path, text, load=config.load_config if of_bench else load_config)
    assert "\n" not in str(error.value)


NAN, INF = float("nan"), float("inf")
SIZES = """steps validate_every checkpoint_every keep_checkpoints model.hidden_size model.num_layers
model.num_heads model.ffn_hidden_size model.seq_length data.batch_size data.microbatches
data.validation_batches optimizer.decay_steps parallel.tensor"""

OUT_OF_RANGE: list[tuple[str, str, list[float]]] = [
    (SIZES, "an int within [1, 2**31)", [0, -1, 2**31]),
    ("optimizer.warmup_steps", "an int within [0, 2**31)", [-1, 2**31]),
    ("seed", "an int within [0, 2**32)", [-1, 2**32]),
    (
        "optimizer.lr optimizer.clip_norm model.init_std",
        "a float that is finite and above 0 in fp32",
        [0.0, -1.0, 1e39, NAN, INF],
    ),
    (
        "optimizer.min_lr optimizer.weight_decay",
        "a float that is finite and at least 0",
        [-1.0, NAN, INF],
    ),
    ("optimizer.beta1 optimizer.beta2", "a float within [0, 1)", [-0.1, 1.0, NAN]),
    ("data.validation_fraction", "a float above 0 and below 1", [0.0, 1.0, NAN]),
    ("head.max_logits_bytes", "None or an int within [1, 2**63)", [0, -1, 2**63]),
    ("head.filter_eps", "None or a float within [0, 1)", [-0.1, 1.0, NAN]),
]


@pytest.mark.parametrize(
    "key, expected, values", [(key, *rest) for keys, *rest in OUT_OF_RANGE for key in keys.split()]
)
def test_values_out_of_range(tmp_path, key, expected, values):
    option = f"--{key.replace('_', '-')}={values[0]}"
    cases: list[tuple[float, str, list[str]]] = [(values[0], "", [option])]
    for value in values:
        nested: Any = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        cases.append((value, yaml.safe_dump(nested), []))
    for value, text, overrides in cases:
        with pytest.raises(ConfigError) as error:
            from_yaml(tmp_path, text, *overrides)
        assert str(error.value) == f"{key} must be {expected}, got {value}"


OPTIONS = {field.name for field in fields(LossOptions)}


def without_range(hint: Any, key: str = "") -> Iterator[str]:
    if hint in (int, float):
        yield key
    elif is_dataclass(hint):
        for name, inner in get_type_hints(hint, include_extras=True).items():
            if hint is not HeadConfig or name not in OPTIONS:  # which our layer checks
                yield from without_range(inner, f"{key}.{name}")
    elif get_origin(hint) is not Annotated:
        for inner in get_args(hint):
            yield from without_range(inner, key)


@pytest.mark.parametrize("schema", [RunConfig, config.BenchConfig, Settings])
def test_every_number_declares_its_range(schema):
    assert list(without_range(schema)) == []


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    config = load_config(["--config", str(path)], world_size=2)
    assert config.parallel.tensor == 2
    assert config.parallel.sequence_parallel


THEIRS = ["--head.kind", "megatron_fused"]
SMOOTH_CAP = ["--head.softcap", "30", "--head.label-smoothing", "0.1"]


@pytest.mark.parametrize("overrides, world_size, message", [
    (["--model.num-heads", "6"], 2, r"model\.hidden_size must be divisible by .* = 6"),
    ([], 3, r"number of ranks that torchrun starts must be divisible by parallel\.tensor = 2"),
    (["--parallel.tensor", "8"], 8, r"model\.num_heads must be divisible by parallel\.tensor"),
    ([*THEIRS, "--head.z-loss-weight", "1e-4"], 2, r"head\.z_loss_weight is an .* 0\.0001"),
    (["--model.ffn-hidden-size", "33"], 2, r"model\.ffn_hidden_size must be divisible by"),
    (["--model.seq-length", "33"], 2, r"seq_length must be divisible by .* = 2, got 33"),
    (["--model.num-heads", "128"], 2, r"even for rotary embeddings, got 1"),
    (["--optimizer.min-lr", "1"], 2, r"min_lr must be at most optimizer\.lr = 0\.003, got 1"),
    (["--optimizer.warmup-steps", "101"], 2, r"at most optimizer\.decay_steps = 100, got 101"),
    (["--optimizer.weight-decay", "500"], 2, r"weight_decay must be below 1 / .*, got 500"),
    (["--head.schedule", "cached", *SMOOTH_CAP], 2, r"^head\.schedule='cached' .*='recompute'"),
    (["--head.filter-eps", "0", "--head.schedule", "cached"], 2, r"^head\.filter_eps needs"),
    (["--head.filter-eps", "0.1", "--head.softcap", "30"], 2, "^head.filtered.* needs softcap"),
    ([*THEIRS, "--head.skip-ignored"], 2, r"head\.skip_ignored is an .*, got True .*, False$"),
    (["--data.text", "nowhere.txt"], 2, r"data\.text must be a file, got nowhere\.txt"),
    (["--data.text", "x" * 300], 2, r"data\.text must be a file, got xxx"),
    (["--config", "nowhere.yaml"], 2, r"--config must .* got nowhere\.yaml: No such file or"),
    (["--config", "."], 2, r"--config must name a file that can be read, got \.: Is a direc"),
    (["--config"], 2, "--config must be followed by a YAML file"),
])  # fmt: skip
def test_impossible_combinations(overrides, world_size, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides, world_size=world_size)


def test_without_sequence_parallelism_the_sequence_needs_no_division():
    overrides = ["--parallel.no-sequence-parallel", "--model.seq-length", "33"]
    assert load_config(overrides, world_size=2).model.seq_length == 33


def test_what_a_resume_may_change():
    saved = flatten(RunConfig()) | {"world_size": 2}
    assert resume_conflicts(saved, saved) == []
    assert set(saved) > MAY_CHANGE_ON_RESUME
    longer = flatten(RunConfig(steps=9, out_dir=Path("elsewhere"))) | {"world_size": 2}
    assert resume_conflicts(saved, longer) == []
    wider = flatten(RunConfig(model=ModelConfig(hidden_size=256), seed=2)) | {"world_size": 4}
    assert resume_conflicts(saved, wider) == [
        "model.hidden_size is 128 there and 256 here",
        "seed is 1234 there and 2 here",
        "world_size is 2 there and 4 here",
    ]
    older = {key: value for key, value in saved.items() if key != "data.prompt_tokens"}
    assert resume_conflicts(older, saved) == []
    assert resume_conflicts(older, saved | {"data.prompt_tokens": 8}) == [
        "data.prompt_tokens is 0 there and 8 here"
    ]
    assert resume_conflicts(saved | {"model.rope": True}, saved) == [
        "model.rope is True there and unknown here"
    ]


def test_a_run_without_a_configuration_has_a_folder_of_its_own():
    """Its values are no shipped configuration's, which could not continue it."""
    shipped = [path for path in CONFIGS if "out_dir" in path.read_text()]
    folders = [read_yaml(RunConfig, path).out_dir for path in shipped]
    assert folders and RunConfig().out_dir not in folders


def test_learning_rate_rises_falls_and_stays():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12)
    assert [learning_rate(step, config) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(8, config) == pytest.approx(0.55)
    assert learning_rate(12, config) == learning_rate(99, config) == pytest.approx(0.1)
    flat = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=0, decay_steps=1)
    assert learning_rate(1, flat) == pytest.approx(0.1)


@pytest.mark.parametrize("arguments, message", [
    (["--out-dir", ""], "--out-dir must have a value, got ''"),
    (["--steps", "3", "--data.text="], "--data.text must have a value, got ''"),
    (["--config", ""], "--config must have a value, got ''"),
    (["--config", "a.yaml", "--config=b.yaml"], "--config must be given once, got it twice"),
    (["--conf", "a.yaml"], r"unknown option --conf; did you mean --config\?"),
    (["a.yaml", "--steps", "3"], "a YAML file is given by --config, got a.yaml alone"),
])  # fmt: skip
def test_a_wrong_command_line_is_explained_before_files_are_read(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config(arguments)


@pytest.mark.parametrize("name", ["plot", "verify"])
def test_an_empty_path_is_refused_by_every_program(name):
    pytest.importorskip("matplotlib")
    program = importlib.import_module(f"flce_dist.launch.{name}.__main__")
    with pytest.raises(ConfigError, match="--out must have a value, got ''"):
        program.main(["--out", ""])


@pytest.mark.parametrize("load", [load_config, config.load_config])
def test_help_explains_the_option_config(load, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    load_args = {"world_size": 1} if load is config.load_config else {}
    with pytest.raises(SystemExit):
        load(["--help"], **load_args)
    assert "--config FILE names a YAML file" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bench", "plot", "verify"])
def test_a_description_is_of_whole_paragraphs(name, monkeypatch, capsys):
    """A line that begins with no letter would be broken off, wherever it ends."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "1000")
    program = importlib.import_module(f"flce_dist.launch.{name}.__main__")
    with pytest.raises(SystemExit):
        program.main(["--help"])
    text = capsys.readouterr().out
    description = re.split(r"\n\W+(positional arguments|options)\W+\n", text)[0]
    for paragraph in description.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and line[0] != " "]
        assert len(lines) <= 1, paragraph
    assert "filter_eps" not in text


@pytest.mark.parametrize(("module", "least"), [("train", 15), ("bench", 15), ("verify", 4)])
def test_the_help_of_an_option_is_one_line(module, least):
    """Its line breaks would be kept, wherever they are."""
    file = "__main__" if module == "verify" else "config"
    text = (Path(__file__).parents[1] / "launch" / module / f"{file}.py").read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    helps = [
        text.value.value
        for node in classes
        for option, text in pairwise(node.body)
        if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr)
        if isinstance(text.value, ast.Constant)
    ]
    assert len(helps) >= least
    assert [text for text in helps if "\n" in str(text)] == []
