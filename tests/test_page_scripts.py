"""The script at the beginning of a page runs as it is printed, on CPUs, and its loss falls."""

import re
import sys
from importlib.util import find_spec

import pytest

from tests.doc_scripts import WITHOUT_FINALIZING
from tests.processes import ROOT, started, torchrun

MOST_LINES = 25
NEEDS = {
    "data_parallel_head": "torch",
    "parallel_style": "torch",
    "torchtitan": "torchtitan",
}


@pytest.mark.parametrize("page", NEEDS)
def test_a_page_begins_with_a_script_that_trains(page, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    script = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)[0]
    assert script.count("\n") <= MOST_LINES
    if find_spec(NEEDS[page]) is None:
        pytest.skip(f"{NEEDS[page]} is not installed")
    path = tmp_path / "script.py"
    if "torchrun" in script:
        path.write_text(script + WITHOUT_FINALIZING)
        command = torchrun(str(path))
    else:
        path.write_text(script)
        command = [sys.executable, "-W", "ignore", str(path)]
    with started(command, tmp_path / "logs") as running:
        (status,), (output,) = running.finish()
    assert status == 0, output
    losses = [float(x) for x in re.findall(r"^\d+ (\d+\.\d+)$", output, re.M)]
    assert len(losses) == 10, output
    assert losses[-1] < 0.7 * losses[0], output
