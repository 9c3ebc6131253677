"""Lines of Megatron's contract for an output layer, on the installed megatron-core; their list."""

import json

import pytest
import torch

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked

from tests.contract import __main__ as contract
from tests.contract.compare import LINES, compare
from tests.contract.listed import PAGE, RESULTS, with_lines
from tests.contract.models import SETTINGS, Setting
from tests.contract.run_version import outcome


def quick() -> list[tuple[Setting, str]]:
    """Each line under sequence parallelism, and some in the other settings of up to 2 ranks."""
    some = ("tied embeddings", "bf16 parameters", "fusion: bf16 parameters, fp32 main_grad")
    others = [(at, title) for at in (Setting(1, False), Setting(2, False)) for title in some]
    return [*((Setting(2, True), title) for title in LINES), *others]


@pytest.mark.parametrize("at, title", quick(), ids=str)
def test_a_line_of_the_contract(pools, at, title):
    one = outcome(pools[2 * at.tp], title, at)
    assert isinstance(one, float) or one.startswith("n/a: "), one


def test_a_difference_shows():
    right = torch.ones(3)
    for ours, theirs, message in [
        (1.001 * right, right, "x: relative error"),
        (right.bfloat16(), right, "x: torch.bfloat16"),
        (True, right, "x: True for a tensor"),
        (0 * right, 0 * right, "zeros compare nothing"),
        (False, True, "x: False for True"),
    ]:
        with pytest.raises(AssertionError, match=message):
            compare({"x": ours}, {"x": theirs}, 1e-5)
    with pytest.raises(AssertionError, match=r"\['x'\]"):
        compare({}, {"x": right}, 1e-5)


@pytest.mark.parametrize(("outcome", "status"), [(1e-7, 0), ("n/a: x", 0), ("fail: x", 1)])
def test_a_line_that_does_not_hold_is_the_exit_status(outcome, status, monkeypatch, tmp_path):
    line = next(iter(LINES))
    lines = {line: {str(SETTINGS[0]): outcome}}
    found = {"megatron-core": "0.19.9", "lines": lines}
    monkeypatch.setattr(contract, "run", lambda release: found)
    for name in ("RESULTS", "PAGE"):
        copy = tmp_path / getattr(contract, name).name
        copy.write_text(getattr(contract, name).read_text())
        monkeypatch.setattr(contract, name, copy)
    assert contract.main(["0.19"]) == status
    assert json.loads(contract.RESULTS.read_text())["lines"][line]["0.19.9"] == lines[line]


def test_every_line_holds_in_every_release_and_the_page_says_so():
    page = PAGE.read_text()
    assert page == with_lines(page)
    lines = json.loads(RESULTS.read_text())["lines"]
    assert lines.keys() == LINES.keys()
    for title, versions in lines.items():
        assert len(versions) == 6, title
        for version, found in versions.items():
            assert found.keys() == {str(at) for at in SETTINGS}, (title, version)
            for one in found.values():
                assert isinstance(one, float) or one.startswith("n/a: "), (title, version, one)
