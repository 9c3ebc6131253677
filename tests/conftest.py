"""Settings of every test process, and workers that many tests share."""

import gc
import os
import threading
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.testing import RankPool, run_ranks
from tests import machine
from tests.processes import LAST_RESORT_S

# Tests count collectives, and plant wrong labels; those of the check itself set it to 1.
os.environ.setdefault("FLCE_DIST_CHECK_RANKS", "0")

# Tests are small, and several processes or simulated ranks share the cores.
torch.set_num_threads(1)

# Tests wait for events; only a hang, on however busy a machine, should meet a limit.
for waits in (run_ranks, RankPool.__init__):
    waits.__kwdefaults__ = {**(waits.__kwdefaults__ or {}), "timeout_s": LAST_RESORT_S}
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")

LONG_FILES = ("test_compile.py", "test_train.py")
NO_TIMEOUT = f"a test that hangs is not ended: that {machine.missing('pytest_timeout')}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton-interpreter", action="store_true",
        help="interpret kernels as Triton does, 15 times as slowly as tests/interpreter.py",
    )  # fmt: skip
    if not find_spec("pytest_timeout"):
        parser.addini("timeout", NO_TIMEOUT)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from a run that also takes tests of the CPU; share them among workers of others."""
    if not find_spec("pytest_timeout"):
        config.addinivalue_line("markers", f"timeout(seconds): {NO_TIMEOUT}")
    if not machine.is_for_gpus(config.option.markexpr):
        machine.hide_gpus()
        # A first backward decides how many threads autograd has. After one of code that torch 2.11
        # has compiled there are some even without a GPU, and forks then cannot run backward.
        torch.ones((), requires_grad=True).backward()
        # torch.manual_seed lets absent devices note its stack for later, which takes milliseconds.
        for absent in (torch.cuda, torch.mtia, torch.xpu):
            vars(absent)["manual_seed_all"] = lambda seed: None
    elif hasattr(config, "workerinput") and torch.cuda.device_count() > 1:
        worker = int(config.workerinput["workerid"].removeprefix("gw"))
        machine.begin_with_gpu(worker, torch.cuda.device_count())


def pytest_report_header() -> str | None:
    return None if find_spec("pytest_timeout") else NO_TIMEOUT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files of few tests that take long: workers get whole files, in this order."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    machine.skip_without_gpus(items, torch.cuda.device_count())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    machine.name_what_is_missing(report)
    return report


pytest_runtest_makereport = pytest_make_collect_report


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    from tests.interpreter import make_fast, mend  # imports triton

    mend()
    with pytest.MonkeyPatch.context() as patch:
        if not (torch.cuda.is_available() or request.config.getoption("--triton-interpreter")):
            make_fast(patch)
        yield patch


@pytest.fixture(scope="session", autouse=True)
def modules_not_examined() -> None:
    """Tests of memory collect garbage often: a third of a second each among all that is loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Forked gloo workers by P, started when they are first used.

    Of one file: each group that is left in a rank has a thread that wakes up often.
    """
    with RankPool(1) as one, RankPool(2) as two, RankPool(4) as four:
        yield {1: one, 2: two, 4: four}


@pytest.fixture(scope="module")
def ranks(pools: dict[int, RankPool]) -> RankPool:
    return pools[2]


@pytest.fixture(autouse=True)
def decided_anew() -> None:
    """No test uses what another decided after it had patched something."""
    from flce_dist.arguments import decided_once  # imports triton

    decided_once.calls.clear()


@pytest.fixture(autouse=True)
def gpu_memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Several workers may share a GPU, and no other gets what a caching allocator keeps."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.empty_cache()


@pytest.fixture
def ranks_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare their first calls, as they do outside of tests."""
    monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", "1")


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[..., Any]], None]:
    """``mutate(owner, name, wrong)`` turns ``owner.name(...)`` into ``wrong(original, ...)``."""

    def patch(owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: wrong(original, *args, **kwargs))

    return patch


@pytest.fixture
def one_launch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has one grid for all threads of a process, the compiler one cache."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction
    from triton.runtime.jit import JITFunction

    owner: Any = JITFunction if torch.cuda.is_available() else InterpretedFunction
    # Its run also parses a kernel at first; Triton 3.5 has one of each kernel.
    owner, name = (owner, "run") if hasattr(owner, "run") else (GridExecutor, "__call__")
    lock = threading.RLock()
    launch = getattr(owner, name)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, run)


@pytest.fixture
def merged_sums(mutate: Callable[..., None]) -> list[Tensor]:
    """The sums of all ranks from which each call made its statistics: limbs, in fp64."""
    from flce_dist.kernels import gpu  # imports triton

    seen: list[Tensor] = []

    def spy(token_loss: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[4][:-1].clone())  # without the bins, which mean nothing any more
        return token_loss(*args, **kwargs)

    mutate(gpu, "token_loss", spy)
    return seen
