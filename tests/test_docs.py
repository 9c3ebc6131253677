"""README and docs: Python runs as it is printed, on a CPU; links and citations resolve."""

import copy
import inspect
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import flce_dist
from flce_dist.launch.train.config import load_config
from tests import results
from tests.on_ranks import on_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
README = (ROOT / "README.md").read_text()
BLOCKS: dict[str, str] = dict(
    re.findall(r"^##+ ([^\n]*)\n(?:(?!^#).)*?^```python\n(.*?)^```$", README, re.M | re.S)
)
"""The Python under each heading."""


def example(heading: str) -> dict[str, Any]:
    """Run the Python under a heading where there is no GPU; return its variables."""
    names: dict[str, Any] = {}
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        exec(compile(BLOCKS[heading], f"README.md, {heading}", "exec"), names)
    return names


def test_every_block_is_tested():
    assert README.count("```python") == len(BLOCKS)
    assert set(BLOCKS) == {
        "On one GPU",
        "Under tensor and sequence parallelism",
        "The function",
        "In a model of megatron-core or transformers",
    }


def test_one_gpu():
    names = example("On one GPU")
    assert names["loss"].dtype == torch.float32 and names["loss"].shape == ()
    for name in ("hidden", "weight"):
        assert names[name].grad.shape == names[name].shape and names[name].grad.abs().sum() > 0


def tensor_parallel(tp_group: dist.ProcessGroup) -> tuple[float, bool]:
    with mock.patch.object(dist, "init_process_group"):  # there is one already
        names = example("Under tensor and sequence parallelism")
    hidden, T = names["hidden"], names["T"]
    assert hidden.grad.shape == hidden.shape == (T // tp_group.size(), names["H"])
    return names["loss"].item(), bool(hidden.grad.abs().sum() > 0)


def test_tensor_parallel(pools):
    first, second = pools[2].run(tensor_parallel)
    assert first == second and first[1]


def test_the_signature():
    names: dict[str, Any] = {}
    exec("def " + BLOCKS["The function"].rstrip() + ": ...", names)
    printed = inspect.signature(names["linear_cross_entropy"]).parameters
    for function in (flce_dist.linear_cross_entropy, flce_dist.linear_cross_entropy_with_metrics):
        expected = inspect.signature(function).parameters
        assert {name: (x.kind, x.default) for name, x in printed.items()} == {
            name: (x.kind, x.default) for name, x in expected.items()
        }


@on_ranks(1)
def test_a_model_of_megatron(group):
    from tests.megatron_models import batch, megatron, token_losses

    model = megatron(1, sp=False, tied=False)
    with mock.patch("megatron.core.models.gpt.GPTModel", lambda *_: model):
        names = example("In a model of megatron-core or transformers")
    assert names["model"] is model and type(model.output_layer).__module__.startswith("flce_dist.")
    assert 0 < token_losses(model, *batch()).mean() < 10


def test_simulated_ranks():
    page = (ROOT / "docs" / "testing.md").read_text()
    (printed, *_) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(printed, names)
    names["test_every_rank_returns_the_same_loss"]()
    with pytest.raises(AssertionError), mock.patch.dict(names, run_ranks=lambda *_: [0, 1]):
        names["test_every_rank_returns_the_same_loss"]()


def links(page: Path) -> list[tuple[Path, str]]:
    """Return ``(file, anchor)`` of each link of a page that stays in the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    parts = [target.partition("#") for target in found if "://" not in target]
    return [((page.parent / file).resolve() if file else page, end) for file, _, end in parts]


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_resolve():
    for page in PAGES:
        for file, anchor in links(page):
            assert file.exists(), f"{page.name}: {file.name}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {file.name}#{anchor}"


def test_results_are_cited():
    cited = {file for page in PAGES for file, _ in links(page)}
    assert set((ROOT / "docs" / "results").iterdir()) <= cited


WRITES = "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_and_commits_are_those_of_the_files(page):
    assert results.written(page.read_text()) == page.read_text()


def test_every_file_is_measured_by_a_grid():
    for machine, plan in results.spec()["machines"].items():
        measured = results.commands(machine, Path("out"))
        assert {*plan["alone"]} <= measured.keys() == plan["files"].keys()
        for command in itertools.chain(*measured.values()):
            grids = [ROOT / word for word in command if word.startswith("configs/")]
            assert all(grid.is_file() for grid in grids)
            programs = {"flce_dist.launch.bench", "flce_dist.launch.finetune"}
            assert len(grids) == len(programs & {*command})


def test_training_is_measured_by_configurations_that_load(capsys, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("words")
    measured = results.training_commands("two GPUs", tmp_path / "out", text)
    assert measured.keys() == results.spec()["machines"]["two GPUs"]["training"].keys()
    for name, (_, _, module, *arguments, _, to) in measured.items():
        assert module.startswith("flce_dist.launch.train") and to == str(tmp_path / "out" / name)
        config = load_config(arguments)
        assert config.parallel.tensor == 2 and config.data.text in (None, text)
    assert not capsys.readouterr().out
    without = results.training_commands("two GPUs", tmp_path / "out", None)
    assert without.keys() == {"head-h200-x2"}
    assert capsys.readouterr().out == "training-x2: not measured, since it needs --text\n"


def test_a_run_that_trains_leaves_its_comparison_as_a_result(monkeypatch, capsys, tmp_path):
    files, new = tmp_path / "files", tmp_path / "new"
    files.mkdir()
    writes = "import pathlib, sys; folder = pathlib.Path(sys.argv[1]); folder.mkdir(); "
    writes += "[(folder / f'compare.{x}').write_text(x) for x in ('json', 'png')]"
    command = [sys.executable, "-c", writes, f"{new / 'head'}"]  # fails if it runs again
    plan = {"gpus": 1, "alone": [], "files": {}, "training": {"head": "train"}}
    monkeypatch.setattr(results, "spec", lambda: {"machines": {"one": plan}, "figures": []})
    monkeypatch.setattr(results, "training_commands", lambda *_: {"head": command})
    monkeypatch.setattr(results, "groups_of_gpus", lambda _: ["0"])
    monkeypatch.setattr(results, "FILES", files)
    monkeypatch.setattr(results, "PAGES", [])
    assert results.measure_all("one", new, None) == 0
    assert results.measure_all("one", new, None) == 0
    assert capsys.readouterr().out == "head: measured before\n"
    (new / "head.done").write_text("another commit")
    assert results.measure_all("one", new, None) == 1
    assert capsys.readouterr().out == "head: exit status 1\n"
    results.show(new)
    taken = {file.name: file.read_text() for file in files.iterdir()}
    assert taken == {"head.json": "json", "head.png": "png"}


def test_a_machine_is_measured_if_its_gpus_are_there(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert results.groups_of_gpus(1) == ["0", "1", "2"] and results.groups_of_gpus(2) == ["0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,6")
    assert results.groups_of_gpus(2) == ["7,5"]
    with pytest.raises(SystemExit, match="4 GPUs needed, found 3"):
        results.measure_all("four GPUs", tmp_path, None)


def test_the_error_closest_to_its_budget_is_kept(tmp_path):
    errors = [("cached", 4, 3e-6, 1e-5), ("auto", 8, 2e-6, 4e-6), ("auto", 9, 9e-6, 1e-4)]
    parts, written = list[list[str]](), list[Any]()
    for i, (schedule, T, error, budget) in enumerate(errors):
        case = {"variant": {"name": "plain", "reduction": "sum"}, "schedule": schedule}
        check = {"loss": {"error": error, "budget": budget}, "same loss": {"error": 0, "budget": 0}}
        record = {"dtype": "fp32", "case": case, "shape": {"T": T}, "checks": check}
        part = {"commit": "abc", "passed": i > 0, "seconds": i, "records": [record]}
        written.append(part)
        parts.append([sys.executable, "-c", WRITES, json.dumps(part), str(tmp_path / f"{i}.json")])
    measuring = results.Measuring(tmp_path, ["0", "1"])
    assert measuring.verify("all", parts) == 0
    found = json.loads((tmp_path / "all.json").read_text())
    (row,) = found["records"]
    assert found["about"]["commit"] == "abc" and not found["about"]["passed"] and row["cases"] == 3
    assert (row["loss"], row["loss_budget"]) == (2e-6, 4e-6)
    assert row["loss_case"] == "plain (sum), auto, T=8"
    written[2]["records"][0]["checks"]["loss"]["error"] = None
    (row,) = results.closest(copy.deepcopy(written))["records"]
    assert row["loss"] is None and row["loss_case"] == "plain (sum), auto, T=9"
    written[1]["commit"] = "def"
    with pytest.raises(ValueError, match="parts must be of one commit and machine"):
        results.closest(written)


PART = """
import sys
text, status, path = sys.argv[1:]
open(path, "w").write(text)
open(f"{path}.runs", "a").write("x")
sys.exit(int(status))
"""


def test_parts_of_verify_that_missed_a_budget_or_are_of_another_commit_run_again(tmp_path, capsys):
    """Their files are there all the same."""
    part = json.dumps({"commit": "abc", "passed": False, "seconds": 1, "records": []})
    statuses = {"met": 0, "missed": 1}
    parts = [
        [sys.executable, "-c", PART, part, str(status), str(tmp_path / f"{name}.json")]
        for name, status in statuses.items()
    ]
    measuring = results.Measuring(tmp_path, ["0"])
    for _ in range(2):
        assert measuring.verify("all", parts) == 1
    assert (tmp_path / "all.json").exists()
    runs = {name: len((tmp_path / f"{name}.json.runs").read_text()) for name in statuses}
    assert runs == {"met": 1, "missed": 2}
    assert capsys.readouterr().out.count("missed: exit status 1\n") == 2
    (tmp_path / "met.done").write_text("another commit")
    (tmp_path / "all.json").unlink()
    parts[0][2] = "raise SystemExit(3)"
    assert measuring.verify("all", parts) == 3
    assert not (tmp_path / "all.json").exists(), "a file of another commit stands for none"


def test_a_killed_command_has_not_succeeded():
    kill_itself = "import os; os.kill(os.getpid(), 9)"
    assert results.run([sys.executable, "-c", kill_itself], "") > 0


def test_new_files_bring_their_figures(monkeypatch, tmp_path):
    files, new = tmp_path / "files", tmp_path / "new"
    for folder, names in ((files, ["dial-dial.png", "peers-memory.png"]), (new, ["dial.json"])):
        folder.mkdir()
        for name in names:
            (folder / f"bench-{name}").touch()
    shutil.copy(results.FILES / "bench-dial.json", new)
    monkeypatch.setattr(results, "FILES", files)
    monkeypatch.setattr(results, "PAGES", [])
    results.show(new)
    sizes = {file.name: file.stat().st_size for file in files.iterdir()}
    assert sizes.keys() == {"bench-dial.json", "bench-dial-dial.png", "bench-peers-memory.png"}
    assert sizes["bench-dial-dial.png"] and not sizes["bench-peers-memory.png"]


def test_a_range_is_of_all_its_records_and_over_those_of_the_same_size(monkeypatch):
    def records(mine: float, theirs: float) -> dict[str, Any]:
        sizes = {1: 1.0, 2: 1.5}
        ours = [
            dict(T=T, impl="triton", mode="forward_backward", ms=mine * x) for T, x in sizes.items()
        ]
        others = [{**one, "impl": "eager", "ms": theirs} for one in ours]
        return {"records": ours + others}

    plain = {"files": ["a", "b"], "where": [{}], "values": ["ms"], "cell": "{x:.1f}"}
    ranges = {
        "times": plain,
        "over": {**plain, "per": {"impl": "eager"}},
        "sum": {**plain, "sum": True},
    }
    monkeypatch.setattr(results, "spec", lambda: {"ranges": ranges})
    monkeypatch.setattr(results, "result", {"a": records(2, 4), "b": records(1, 1)}.get)
    page = "0 to\n 9<!--times--> 8<!--times-->, 0.1 to 0.2<!--over-->, 7<!--sum-->"
    assert results.written(page) == (
        "1.0 to\n 3.0<!--times--> 3.0<!--times-->, 0.5 to 1.5<!--over-->, 7.5<!--sum-->"
    )


def test_another_number_and_another_commit_would_be_noticed():
    names = results.spec()["tables"]
    shown = [name for page in PAGES for name, *_ in results.TABLE.findall(page.read_text())]
    assert sorted(shown) == sorted(names) and all(map(results.table, names))
    page = (ROOT / "docs" / "performance.md").read_text()
    commits = [found[0] for found in results.COMMIT.finditer(page)]
    assert len(commits) >= 6
    marked = [x[4] for page in PAGES for x in results.RANGE.finditer(page.read_text())]
    assert sorted(marked) == sorted(results.spec()["ranges"])
    cell = results.table("one GPU").splitlines()[2].split(" | ")[1]
    (_, most), name = results.extremes("auto-x1"), "<!--auto-x1-->"
    for shown_so, other in (
        (f"| {cell} |", "| 9.99 (17) |"), (f"{most}{name}", f"9.99{name}"), (commits[0], "0000000"),
    ):  # fmt: skip
        assert shown_so in page
        assert results.written(page.replace(shown_so, other, 1)) == page
