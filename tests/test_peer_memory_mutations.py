"""Planted mistakes in the protocol of peer_memory.py, found by orders of streams."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from flce_dist.parallel import peer_memory
from flce_dist.parallel.peer_memory import PeerMemory
from tests import fake_cuda, fake_ranks
from tests.fake_cuda import Stream
from tests.fake_ranks import Hung, Rank
from tests.peer_programs import (
    exception,
    failed_capture,
    gather,
    graph,
    graph_of_one_rank,
    name_of,
    sums,
    training,
    turns,
    two_streams,
    two_streams_of_sums,
)


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread watches the waits of PeerMemory."""
    monkeypatch.setattr(peer_memory, "watch", lambda wait: None)


Plant = Callable[[pytest.MonkeyPatch], None]


def without(name: str) -> Plant:
    """A list of stream operations is empty."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = PeerMemory.__init__

        def wrong(self: Any, *args: Any) -> None:
            init(self, *args)
            setattr(self, name, [])

        patch.setattr(PeerMemory, "__init__", wrong)

    plant.__name__ = f"without{name}"
    return plant


def moved(name: str, behind: str) -> Plant:
    """A list of stream operations comes after another one."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = PeerMemory.__init__

        def wrong(self: Any, *args: Any) -> None:
            init(self, *args)
            setattr(self, behind, getattr(self, behind) + getattr(self, name))
            setattr(self, name, [])

        patch.setattr(PeerMemory, "__init__", wrong)

    plant.__name__ = f"{name}_behind{behind}"
    return plant


def use_left_open_to_the_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerMemory, "close", lambda self: setattr(self, "_capture", None))


def copies_without_the_current_stream(patch: pytest.MonkeyPatch) -> None:
    real = Stream.wait_stream

    def wrong(self: Any, other: Any) -> None:
        if self is self.rank.current:
            real(self, other)

    patch.setattr(Stream, "wait_stream", wrong)


def arrivals_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer_memory.Arrival, "wait", lambda self: self._outs.clear())


def memory_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rank, "keep", lambda *_: None)


def blocks_of_graphs_dropped(patch: pytest.MonkeyPatch) -> None:
    block = property(lambda self: False, lambda self, value: None)
    patch.setattr(fake_cuda.FakeBlock, "in_graph", block, raising=False)


def blocks_of_own_graphs_alone(patch: pytest.MonkeyPatch) -> None:
    def meet(self: Any, what: str) -> None:
        self._driver.meet(what)

    patch.setattr(PeerMemory, "_meet", meet)


def exceptions_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerMemory, "_recover", lambda self, capture: None)


def writable_since_the_failed_capture(patch: pytest.MonkeyPatch) -> None:
    real = PeerMemory.open

    def wrong(self: Any, nbytes: int) -> None:
        writable = self._capture is not None and self._writable
        real(self, nbytes)
        self._writable = writable

    patch.setattr(PeerMemory, "open", wrong)


def test_a_wait_that_stops_what_it_waits_for_is_found(monkeypatch):
    """Ranks say that they are ready after they wait for it: right on streams of their own."""
    real = PeerMemory.pull

    def wrong(self: Any, copies: Any) -> Any:
        tell, self._tell_ready = self._tell_ready, []
        arrivals = real(self, copies)
        self._driver.enqueue(tell, self._driver.current_stream())
        self._tell_ready = tell
        return arrivals

    monkeypatch.setattr(PeerMemory, "pull", wrong)
    assert fake_ranks.run(2, training) == [None, None]
    assert [type(error) for error in fake_ranks.run(2, training, one_queue=True)] == [Hung, Hung]


def of_one_rank(rank: Rank) -> None:
    exception(rank, 3, gather, [1])


@pytest.mark.parametrize(
    ("plant", "program"),
    [
        (without("_await_free"), turns),
        (without("_await_ready"), turns),
        (without("_tell_ready"), turns),
        (without("_tell_free"), turns),
        (moved("_tell_ready", "_await_free"), turns),
        (moved("_tell_free", "_await_ready"), turns),
        (use_left_open_to_the_next, two_streams),
        (use_left_open_to_the_next, two_streams_of_sums),
        (copies_without_the_current_stream, two_streams),
        (arrivals_not_awaited, turns),
        (arrivals_not_awaited, sums),
        (memory_not_kept, functools.partial(exception, at=18)),
        (blocks_of_graphs_dropped, graph),
        (blocks_of_own_graphs_alone, graph_of_one_rank),
        (exceptions_forgotten, functools.partial(exception, at=5)),
        (exceptions_forgotten, of_one_rank),
        (writable_since_the_failed_capture, functools.partial(failed_capture, at=3)),
    ],
    ids=name_of,
)
def test_a_mistake_is_found(plant, program, monkeypatch):
    plant(monkeypatch)
    try:
        ended = fake_ranks.run(2, program, seeds=60)
    except AssertionError:
        return
    if program is of_one_rank:
        assert not isinstance(ended[1], RuntimeError)
    else:
        assert ended != [None, None]
