"""The protocol of peers/memory.py on simulated GPUs (fake_machine.py), in every stream order."""

import functools
import itertools
import queue
import signal
import sys
import threading
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from flce_dist.parallel import transport
from flce_dist.parallel.peers import memory as peer_memory
from flce_dist.parallel.peers import watch as peer_watch
from flce_dist.parallel.peers.memory import PeerMemory
from tests import fake_ranks
from tests.fake_ranks import Hung, Rank
from tests.gpu_peers import ABORTS, CASES, IN_VAIN, P
from tests.peer_programs import (
    SCENARIOS,
    Use,
    captured,
    exception,
    failed_capture,
    failing,
    gather,
    gather_beside,
    memory_of,
    scatter,
)
from tests.processes import LAST_RESORT_S, started


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> list[peer_watch.Wait]:
    """The waits that PeerMemory lets a thread watch; here none does."""
    waits: list[peer_watch.Wait] = []
    monkeypatch.setattr(peer_memory, "watch", waits.append)
    return waits


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize(("P", "seeds"), [(2, 0), (3, 3), (4, 3)])
def test_orders_of_streams(P, seeds, one_queue, name):
    """Every order of two ranks, random ones of more; also with one queue for all streams."""
    assert fake_ranks.run(P, SCENARIOS[name], seeds=seeds, one_queue=one_queue) == [None] * P


def steps_of(use: Use) -> range:
    """The numbers of the calls of CUDA in a use with one peer."""
    steps = []

    def count(rank: Rank) -> None:
        memory = memory_of(rank)
        use(rank, memory, 1)
        before = rank.calls
        use(rank, memory, 2)
        steps.append(rank.calls - before)

    assert fake_ranks.run(2, count) == [None, None]
    return range(1, 1 + max(steps))


each_use = pytest.mark.parametrize("use", [gather, gather_beside, scatter])


@pytest.mark.parametrize("who", [range(8), [1]], ids=["all", "one"])
@each_use
def test_a_capture_that_fails_anywhere(who, use):
    for at in steps_of(use):
        program = functools.partial(failed_capture, at=at, use=use, who=who)
        assert fake_ranks.run(2, program, seeds=2) == [None, None], at


@each_use
def test_all_ranks_raise_anywhere_and_call_again(use):
    for at in steps_of(use):
        program = functools.partial(exception, at=at, use=use)
        assert fake_ranks.run(3, program, seeds=2) == [None] * 3, at


@each_use
def test_one_rank_raises_anywhere_and_no_data_are_mixed(use):
    """Its next call names the ranks that did not join; they wait for it until their limit."""
    for at in steps_of(use):
        program = functools.partial(exception, at=at, use=use, who=[1])
        ended = fake_ranks.run(3, program, seeds=2)
        raised = isinstance(ended[1], RuntimeError)
        assert raised or ended == [None] * 3, at  # that step is behind the last
        assert not raised or (isinstance(ended[0], Hung) and isinstance(ended[2], Hung)), at


@each_use
def test_ranks_raise_at_different_places_and_no_data_are_mixed(use):
    def program(rank: Rank, places: tuple[int, ...]) -> None:
        exception(rank, places[rank.rank], use)

    for places in itertools.product(steps_of(use)[::3], repeat=2):
        ended = fake_ranks.run(2, functools.partial(program, places=places), seeds=1)
        assert all(error is None or isinstance(error, RuntimeError) for error in ended), ended


def test_a_capture_goes_on_after_a_call_that_raised():
    def program(rank: Rank) -> None:
        memory = memory_of(rank)
        gather(rank, memory, 1)
        with pytest.raises(RuntimeError, match="must not be replayed"), rank.capturing():
            with failing(rank, 6):
                gather(rank, memory, 2)
            gather(rank, memory, 3)
        with failing(rank, 6):
            gather(rank, memory, 4)
        with pytest.raises(RuntimeError, match="run the same call once"), rank.capturing():
            gather(rank, memory, 5)
        gather(rank, memory, 6)

    assert fake_ranks.run(2, program) == [None, None]


def test_ranks_that_meet_for_different_reasons_raise():
    def program(rank: Rank) -> None:
        memory = memory_of(rank)
        with pytest.raises(RuntimeError, match=r"rank 0 takes 8 bytes.*; rank 1 gives memory back"):
            gather(rank, memory, 1) if rank.rank == 0 else memory.release()

    assert fake_ranks.run(2, program) == [None, None]


@pytest.mark.parametrize(("in_replay", "P"), [(False, 2), (False, 3), (True, 2)])
def test_a_wait_without_end_is_noticed(in_replay, P, watched):
    said = "rank 1 has waited 12 s for other ranks to publish tokens"
    memories: dict[int, tuple[Rank, PeerMemory]] = {}

    def program(rank: Rank) -> None:
        memory = memory_of(rank)
        memories[rank.rank] = rank, memory
        gather(rank, memory, 1)
        one = captured(rank, memory) if in_replay else None
        if rank.rank:
            one.replay() if one else gather(rank, memory, 2)

    ended = fake_ranks.run(P, program, seeds=0 if P == 2 else 5)
    assert [type(error) for error in ended] == [type(None), *[Hung] * (P - 1)]
    rank, memory = memories[1]
    rank.machine.show_host_words()
    mine = [wait for wait in watched if wait in memory._waits]
    for now, expected in ((0.0, []), (9.0, []), (12.0, [said])):
        assert [text for wait in mine if (text := wait.overdue(now))] == expected
    others = [wait for wait in watched if wait in memories[0][1]._waits]
    assert others and not any(wait.overdue(now) for wait in others for now in (0.0, 99.0))


def test_the_limit_is_that_of_one_wait():
    """Waits that follow each other do not add up, even if every poll sees one."""
    words = torch.zeros(2, dtype=torch.int32)
    wait = peer_watch.Wait(words, 10.0, "rank 0", "rank 1")
    for now in range(0, 100, 5):
        assert wait.overdue(now) is None
        words[:] = 1  # passed one wait, is in the next
    for now, said in ((100, None), (105, None), (111, "rank 0 has waited 11 s for rank 1")):
        assert wait.overdue(now) == said


def test_a_thread_watches_and_ends_the_process(monkeypatch, capsys):
    ended: queue.Queue[threading.Thread] = queue.Queue()

    def abort() -> None:
        ended.put(threading.current_thread())
        raise SystemExit

    wait = mock.Mock()
    wait.overdue.side_effect = [None, None, "rank 0 has waited for ever"]
    monkeypatch.setattr(peer_watch, "_watched", set())
    monkeypatch.setattr(peer_watch, "_POLL_S", 0.0)
    monkeypatch.setattr("threading.enumerate", list)  # not the thread of another test
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    monkeypatch.setattr("os.abort", abort)
    peer_watch.watch(wait)
    ended.get(timeout=LAST_RESORT_S).join()
    assert capsys.readouterr().err == "flce_dist: rank 0 has waited for ever; this process ends\n"


def test_memories_go_with_their_group(monkeypatch):
    alive: set[Any] = set()

    def ranks_of(group: Any) -> list[int]:
        return [0, 1] if group in alive else {}[group]

    def group_named(name: str) -> Any:
        group = mock.Mock(group_name=name)
        alive.add(group)
        return group

    monkeypatch.setattr(transport, "_memories", {})
    monkeypatch.setattr(transport, "_all_reach_all", lambda *_: True)
    monkeypatch.setattr(transport, "number_of_set_up", lambda _: 1)
    monkeypatch.setattr(transport, "PeerDriver", lambda *_: None)
    monkeypatch.setattr(transport, "PeerMemory", lambda *_: mock.Mock(nbytes=1))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 2)
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", ranks_of)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    device = torch.device("cuda", 0)
    one, other = group_named("0"), group_named("1")
    first = transport.memories_of(one, device)
    assert first is not None and transport.memories_of(one, device) is first
    assert transport.memories_of(other, device) is not first and transport.shared_bytes() == 4
    alive.remove(one)
    assert transport.shared_bytes() == 2
    again = group_named("0")
    made: Any = transport.memories_of(again, device)
    assert made not in (None, first)
    alive.clear()
    transport.release_shared_memory()
    assert not made.hidden.release.called and not transport._memories


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_two_processes_on_one_gpu(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    command, store = [sys.executable, "-m", "tests.gpu_peers", name], str(tmp_path / "store")
    with ExitStack() as stack:
        runs = (started([*command, str(rank), store], tmp_path / str(rank)) for rank in range(P))
        ranks = [stack.enter_context(run) for run in runs]
        ended = [rank.finish() for rank in ranks]
    statuses, outputs = [one[0][0] for one in ended], [one[1][0] for one in ended]
    printed = "\n".join(outputs)
    assert statuses == [-signal.SIGABRT if name in ABORTS else 0, 0], printed
    assert "found: " not in printed and (name not in ABORTS or IN_VAIN in outputs[0]), printed
