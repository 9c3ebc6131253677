"""``launch.verify`` on CPU: passes, finds planted faults, reports, refuses.

test_verify_cases.py has its cases and their data.
"""

import contextlib
import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce_dist
from flce_dist import DivergenceWithMetrics, LossWithMetrics, TokenScores
from flce_dist.core.gradients import Gradients
from flce_dist.launch import process_group
from flce_dist.launch.program import RunError
from flce_dist.launch.verify import __main__ as verify
from flce_dist.launch.verify import results as verify_results
from flce_dist.launch.verify.cases import (
    Shape,
    Variant,
    cases,
    divergence_variants,
    score_variants,
    variants,
)
from flce_dist.launch.verify.checks import DRAWS, inputs_and_truths, run_case
from flce_dist.launch.verify.report import Record, worst_case, worst_of_ranks
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import ErrorBudget

SMALL = ["--device", "cpu", "--dtypes", "fp32", "--shapes", "24", "64", "200"]
CALLS = (
    "linear_cross_entropy", "linear_cross_entropy_with_metrics", "linear_logprob",
    "linear_divergence", "linear_divergence_with_metrics",
)  # fmt: skip
FEW = ["--schedules", "cached"]  # most variants of the loss; no filtered gradients


def run(*args: str) -> int:
    return verify.main([*SMALL, *args])


def verify_rank(group: Any, fault: str | None, *args: str, faulty: int = 1) -> tuple[int, str]:
    """Status and output of verify; ``fault``, if it names one, is planted on the last ranks."""
    process_group.OTHERS_S = 1.0
    for name in CALLS if fault is not None and group.rank() >= group.size() - faulty else ():
        call = functools.partial(FAULTS[str(fault)], getattr(flce_dist, name))
        setattr(verify_results, name, call)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return run(*args), printed.getvalue()


def loss_off_by_1e_4(call, *args, **kwargs):
    out = call(*args, **kwargs)
    return out * 1.0001 if isinstance(out, torch.Tensor) else type(out)(out[0] * 1.0001, *out[1:])


def gradient_off_by_1_percent(call, hidden, *args, **kwargs):
    return call(hidden + 0.01 * (hidden - hidden.detach()), *args, **kwargs)


def raises(call, *args, **kwargs):
    raise RuntimeError("kernel does not compile")


FAULTS = {f.__name__: f for f in (loss_off_by_1e_4, gradient_off_by_1_percent, raises)}


def test_passes_in_one_process_in_every_dtype(capsys):
    assert verify.main(["--device", "cpu", "--shapes", "24", "64", "200"]) == 0
    printed = capsys.readouterr().out
    assert "PASS: " in printed
    assert f"torch {torch.__version__}" in printed
    for dtype in ("fp32", "bf16", "fp16"):
        assert f"{dtype}, T=24 H=64 V=200: error / budget" in printed


def test_the_implementation_that_is_asked_for_is_checked(monkeypatch):
    asked = set()

    def noting(case: Any, data: Any, truth: Any, group: Any, impl: Any) -> dict[str, ErrorBudget]:
        asked.add(impl)
        return {"loss": ErrorBudget(0.0, 1.0)}

    monkeypatch.setattr(verify, "run_case", noting)
    assert run(*FEW, "--impl", "triton", "--quiet") == 0
    assert asked == {"triton"}


def test_a_case_that_raises_is_a_miss(mutate, capsys):
    for name in CALLS:
        mutate(verify_results, name, raises)
    assert run(*FEW) == 1
    miss, *_, verdict = capsys.readouterr().out.partition("MISS ")[2].splitlines()
    assert miss == "fp32 (24, 64, 200) plain (mean), cached: RuntimeError: kernel does not compile"
    assert verdict.startswith("FAIL: ")


GRADIENTS = ("dhidden", "dweight", "dbias")
ALL_TRAINED = ("many together", "scores, options", "jsd, options")


def missed(variant: Variant) -> set[str]:
    """Names of the checks that a case in one process in fp32 does not pass."""
    shape, cpu = Shape(24, 64, 200), torch.device("cpu")
    data, truth = inputs_and_truths(variant, shape, 1, torch.float32, cpu, seed=0)
    (case,) = cases(variant, ("recompute",), 1, None)
    expected = truth(case.metric_gradients, None)
    checks = run_case(case, data, expected, None, "eager")
    return {name for name, check in checks.items() if not check.met}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_missing_is_a_miss(mutate, name):
    """Whatever the call is, whether its other results are right or not."""

    def without(finished: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        gradients = list(finished(*args, **kwargs))
        gradients[GRADIENTS.index(name)] = None
        return tuple(gradients)

    every = (*variants(), *score_variants(), *divergence_variants())
    found = [variant for variant in every if variant.name in ALL_TRAINED]
    assert len(found) == len(ALL_TRAINED)
    for variant in found:
        assert missed(variant) == set()
    mutate(Gradients, "finished", without)
    for variant in found:
        assert missed(variant) == {name}, variant.name


def a_tenth_of_a_percent_more(x: torch.Tensor) -> torch.Tensor:
    """With the same gradient; flags are all others."""
    return ~x if x.dtype == torch.bool else x + 1e-3 * x.detach()


@pytest.mark.parametrize(("call", "variants", "name", "fields"), [
    ("linear_cross_entropy_with_metrics", variants, "metrics", LossWithMetrics._fields),
    ("linear_logprob", score_variants, "scores", TokenScores._fields),
    ("linear_divergence_with_metrics", divergence_variants, "jsd", DivergenceWithMetrics._fields),
])  # fmt: skip
def test_a_wrong_number_of_any_result_is_a_miss(monkeypatch, call, variants, name, fields):
    right = getattr(flce_dist, call)
    variant = next(x for x in variants() if x.name == name)
    for field in fields:

        def wrong(*args: Any, field: str = field, **kwargs: Any) -> Any:
            out = right(*args, **kwargs)
            return out._replace(**{field: a_tenth_of_a_percent_more(getattr(out, field))})

        monkeypatch.setattr(verify_results, call, wrong)
        assert missed(variant) == {"correct" if field == "same_best" else field}


def test_a_result_that_is_missing_is_an_error(mutate):
    (scores, *_) = score_variants()

    def without_entropy(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)._replace(entropy=None)

    mutate(verify_results, "linear_logprob", without_entropy)
    with pytest.raises(ValueError, match=r"^results must be \[.*'entropy'.*\], got \["):
        missed(scores)


def test_a_rank_that_raises_alone_ends_the_run(pools):
    with pytest.raises(RunError, match=r"^rank 1: fp32 .*kernel.*; ranks \[0\] are left in"):
        pools[2].run(verify_rank, "raises", *FEW)
    ended = pools[2].run(verify_rank, "raises", *FEW, faulty=2)
    pools[2].close()  # the fault stays in the workers
    assert "cached: rank 0: RuntimeError" in ended[0][1] and {code for code, _ in ended} == {1}


@pytest.mark.parametrize("fault", [None, "gradient_off_by_1_percent", "loss_off_by_1e_4"])
def test_all_ranks_agree_on_the_verdict(pools, fault, tmp_path):
    """The fault is on one rank only; every rank exits with the same status."""
    output = tmp_path / "verify.json"
    few = [] if fault is None else FEW
    ended = pools[2].run(verify_rank, fault, *few, "--output", str(output))
    pools[2].close()  # the fault stays in the last worker
    assert [code for code, _ in ended] == ([0, 0] if fault is None else [1, 1])
    assert " 2 x CPU" in ended[0][1] and ended[1][1] == "", "rank 0 alone prints"
    found = json.loads(output.read_text())
    assert found["passed"] is (fault is None)
    assert found["ranks"] == 2
    assert len(found["records"]) > (20 if few else 90)
    checks = [r["checks"] for r in found["records"]]
    assert sum("places" in of_case for of_case in checks) >= 2  # best ids, which have no fault here
    differ = [of_case["same loss"]["error"] for of_case in checks if "places" not in of_case]
    assert all((error > 0) is (fault == "loss_off_by_1e_4") for error in differ)


def test_a_shape_that_does_not_fit_is_an_error_before_anything_is_checked(tmp_path, capsys):
    """Whichever of the tensors it is that is too large."""
    output = tmp_path / "verify.json"
    for shape in (
        ("2000000", "1", "2000000"),
        ("2000000000", "2000", "16"),
        ("16", "2000000000", "16"),
    ):
        fits = "--device", "cpu", "--shapes", "24", "64", "200", *shape
        numbers = ", ".join(shape)
        with pytest.raises(ConfigError, match=rf"^shapes must fit .* \({numbers}\) needs .* GiB"):
            verify.main([*fits, "--output", str(output)])
    assert capsys.readouterr().out == "" and not output.exists()


def test_ranks_agree_on_what_fits(pools, tmp_path):
    """The least memory counts, also that of one rank."""
    for faulty, kilobytes in ((1, 10_000), (2, 10_000_000)):
        (tmp_path / f"{faulty}").write_text(f"MemAvailable:   {kilobytes} kB\n")
    found = pools[2].run(memory_rank, tmp_path)
    assert len(set(found)) == 1 and found[0].endswith(
        "on each rank for results in fp64, got 0.0 GiB free"
    )


def memory_rank(group: Any, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "MEMINFO", folder / f"{group.rank() + 1}")
        with pytest.raises(ConfigError) as error:
            run()
    return str(error.value)


TINY = [(16, 8, 16, 16), (16, 16, 10, 16), (17, 2, 12, 19), (32, 8, 16, 13), (16, 1, 10, 0)]
"""And seeds by which chance makes eager PyTorch's error small, or an entropy."""


@pytest.mark.parametrize(("T", "H", "V", "seed"), TINY)
def test_a_few_tokens_are_judged_fairly(T, H, V, seed):
    args = ["--schedules", "cached", "--seed", str(seed), "--device", "cpu", "--quiet"]
    assert verify.main([*args, "--dtypes", "fp32", "--shapes", *map(str, (T, H, V))]) == 0


def test_several_draws_do_not_hide_a_fault(mutate):
    """Of one percent in a gradient of few tokens."""
    variant, shape = variants()[0], Shape(16, 8, 16)
    data, truth = inputs_and_truths(variant, shape, 1, torch.float32, torch.device("cpu"), seed=0)
    (case, *_) = cases(variant, ("recompute",), 1, None)
    expected = truth(False, None)
    assert all(check.met for check in run_case(case, data, expected, None, "eager").values())
    mutate(verify_results, "linear_cross_entropy", gradient_off_by_1_percent)
    check = run_case(case, data, expected, None, "eager")["dhidden"]
    assert not check.met and check.budget < 1e-4 < check.error
    assert expected.draws is not None and len(expected.draws()) == DRAWS
    assert not torch.equal(expected.draws()[0].oracle["dhidden"], expected.oracle["dhidden"])


@pytest.mark.parametrize("args, message", [
    (["--shapes", "16", "0", "16"], r"^shapes\[0\]\[1\] must be an int within .*, got 0$"),
    (["--shapes", "15", "8", "16"], r"^shapes\[0\]\[0\] must be an int within \[16, .* got 15$"),
    (["--shapes", "16", "8", "5"], r"^shapes\[0\]\[2\] must be an int within \[10, .* got 5$"),
    (["--schedules"], "^schedules must name at least one, got none$"),
    (["--dtypes"], "^dtypes must name at least one, got none$"),
    (["--seed=-1"], r"^seed must be an int within \[0, 2\*\*32\), got -1$"),
    (["--device", "cuda"], "^device=cuda needs a GPU, found none$"),
])  # fmt: skip
def test_wrong_values_are_found_before_ranks_meet(args, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        verify.main(args)


def test_kernels_that_this_device_does_not_run_are_refused(monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ConfigError, match=r"^impl='triton' needs a CUDA device.*impl='eager'"):
        run("--impl", "triton")


def record(error: float, budget: float = 1.0, failure: str | None = None) -> Record:
    (case, *_) = cases(variants()[0], ("cached",), 1, None)
    return Record("fp32", Shape(1, 2, 3), case, {"loss": ErrorBudget(error, budget)}, failure)


@pytest.mark.parametrize("worst", [record(2.0), record(float("nan")), record(0.5, failure="boom")])
def test_the_worst_rank_counts(worst, monkeypatch):
    def gather(out, records, group):
        out[:] = [[record(0.5)], [worst], [record(0.1)]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    group: Any = SimpleNamespace(size=lambda: 3)
    (merged,) = worst_of_ranks([record(0.5)], group)
    assert not merged.met and record(0.5).met
    if worst.failure:
        assert merged.failure == "rank 1: boom"


def test_the_worst_case_is_named():
    """By its share of the budget; what raised, then what is NaN, is worse than any miss."""
    title = "fp32, T=1 H=2 V=3: "
    good = [record(0.5), record(0.3, 0.4)]
    met = worst_case(good)
    assert met == f"{title}2 cases, 0 missed; worst: loss 3.0e-01 / 4.0e-01, plain (mean), cached"
    nan = [*good, record(2.0), record(float("nan"))]
    assert f"{title}4 cases, 2 missed; worst: loss nan / 1.0e+00" in worst_case(nan)
    raised = worst_case([*nan, record(0.0, failure="boom")])
    assert raised == f"{title}5 cases, 3 missed; worst: plain (mean), cached raised"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_table_is_printed_once_it_is_measured(monkeypatch, capsys, quiet):
    """Below its worst case, which is all that is left of it with --quiet."""

    def one_and_an_interrupt(*args):
        yield [record(0.5)]
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_tables", one_and_an_interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify.main(["--device", "cpu", *["--quiet"] * quiet])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == worst_case([record(0.5)])
    assert ("fp32, T=1 H=2 V=3: error / budget" in "".join(lines)) is not quiet
    assert bool(lines) is not quiet
