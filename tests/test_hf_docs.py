"""docs/hugging_face.md and docs/rl_libraries.md: scripts run as printed; the list is current."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from tests.hf_sweep_page import PAGE, RESULTS, with_lines

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
MOST_LINES = 25


def printed(script: str, folder: Path, *launcher: str) -> str:
    """Run a script as a program of its own, on a CPU and without a hub; return what it prints."""
    assert script.count("\n") <= MOST_LINES
    path = folder / "script.py"
    path.write_text(script)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_lora(tmp_path):
    pair, *losses = printed(SCRIPTS[0], tmp_path).splitlines()
    difference = float(re.findall(r"difference=tensor\((.*?)\)", pair)[0])
    assert difference < 1e-5
    assert len(losses) == 3 and float(losses[2]) < float(losses[0])


@pytest.mark.parametrize("processes", [1, 2])
def test_trainer(processes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    text = printed(SCRIPTS[1], tmp_path, *(launcher if processes > 1 else []))
    losses = re.findall(r"^(\d+\.\d+)$", text, re.M)
    assert len(losses) == processes and all(10 < float(x) < 11 for x in losses)


def test_trl(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed: `make rl` installs it")
    page = (ROOT / "docs" / "rl_libraries.md").read_text()
    script = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[0]
    losses = re.findall(r"^(\d+\.\d+)$", printed(script, tmp_path), re.M)
    assert len(losses) == 1 and 1 < float(losses[0]) < 3


def test_every_script_is_run():
    assert len(SCRIPTS) == 2


def test_the_list_of_classes_is_that_of_its_file():
    found = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == with_lines(PAGE.read_text(), found)
    assert not [name for name, x in found["classes"].items() if x["result"] == "WRONG"]
    assert sum(x["result"] == "fused" for x in found["classes"].values()) > 150
