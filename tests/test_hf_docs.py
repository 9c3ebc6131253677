"""docs/hugging_face.md: its scripts run as they are printed, and its list of classes is current."""

import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from flce_dist import hf
from tests.doc_scripts import WITHOUT_FINALIZING, printed, scripts_of
from tests.docstring_examples import run_example
from tests.hf_models import batch, theirs
from tests.hf_sweep_page import PAGE, RESULTS, with_lines

SCRIPTS = scripts_of(PAGE)


@pytest.mark.parametrize("script", [0, 1], ids=["plain", "adapters"])
def test_a_model(script, tmp_path):
    pair, *losses = printed(SCRIPTS[script], tmp_path).splitlines()
    difference = float(re.findall(r"difference=tensor\((.*?)\)", pair)[0])
    assert difference < 1e-5
    assert len(losses) == 3 and float(losses[2]) < float(losses[0])


@pytest.mark.parametrize("processes", [1, 2])
def test_trainer(processes, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launcher += ["--redirects=1", f"--log-dir={tmp_path}"]  # lines of two processes may mix
    script = SCRIPTS[2] + WITHOUT_FINALIZING
    text = printed(script, tmp_path, *(launcher if processes > 1 else []))
    text += "".join(path.read_text() for path in tmp_path.rglob("stdout.log"))
    found = re.findall(r"^(\d) (\d+\.\d+)$", text, re.M)
    assert [int(world_size) for world_size, _ in found] == [processes] * processes
    assert all(10 < float(loss) < 11 for _, loss in found)


def test_every_script_is_run():
    assert len(SCRIPTS) == 3


def test_the_list_of_classes_is_that_of_its_file():
    found = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == with_lines(PAGE.read_text(), found)
    assert not [name for name, x in found["classes"].items() if x["result"] == "WRONG"]
    assert sum(x["result"] == "fused" for x in found["classes"].values()) > 150


def test_examples_of_docstrings():
    llama = theirs()
    names = {
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda name: llama),
        "name": "any",
        "use_linear_cross_entropy": hf.use_linear_cross_entropy,
        "check_loss": hf.check_loss,
        "ids": batch()["input_ids"],
    }
    made = run_example(hf.use_linear_cross_entropy, **names)
    assert made["loss"].isfinite()
    assert run_example(hf.check_loss, **names, model=made["model"])["difference"] < 1e-5
