"""How long the control plane's ends sleep when they are to look again soon."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from hvd_async.runtime import transport


class Poller:
    """Has nothing to tell, and notes how many milliseconds it was to wait."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def poll(self, milliseconds: int | None) -> list[tuple[int, int]]:
        self.asked.append(milliseconds)
        return []


@pytest.fixture
def sleeper() -> Iterator[transport.Sleeper]:
    endpoint = transport.Endpoint(zmq.DEALER, zmq.EVENT_DISCONNECTED)
    made = transport.Sleeper(endpoint)
    yield made
    made.close()
    endpoint.close()


@pytest.mark.parametrize(("timeout", "milliseconds"), [(None, None), (0.0, 0), (0.001, 1), (0.0042, 5)])
def test_a_timeout_is_rounded_up_to_whole_milliseconds(sleeper, timeout, milliseconds):
    sleeper._poller = poller = Poller()
    assert not sleeper.wait(timeout)
    assert poller.asked == [milliseconds]


def test_one_of_less_than_a_millisecond_is_not(monkeypatch, sleeper):
    timeouts = []
    monkeypatch.setattr(transport.select, "select", lambda *asked: timeouts.append(asked[-1]) or ([], [], []))
    assert not sleeper.wait(0.0002)
    assert timeouts == [0.0002]


@pytest.mark.parametrize("selectable", [transport.SELECTABLE, 0])
def test_a_thread_that_waits_so_shortly_is_woken_too(monkeypatch, sleeper, selectable):
    monkeypatch.setattr(transport, "SELECTABLE", selectable)
    for _ in range(3):
        sleeper.wake()
        assert not sleeper.wait(0.0002), "no endpoint has anything"
    assert not sleeper._ready(0.0), "what woke it is forgotten"


def test_waking_an_awake_sleeper_makes_no_system_call_and_skips_its_next_sleep(sleeper):
    sent: list[bytes] = []
    sleeper._sender = SimpleNamespace(send=sent.append, close=sleeper._sender.close)
    sleeper._poller = poller = Poller()
    sleeper.wake()
    sleeper.wake()
    assert sent == []
    assert not sleeper.wait(None)
    assert poller.asked == [0], "a wake was pending"
    poller.poll = lambda milliseconds: sleeper.wake() or []  # it sleeps
    assert not sleeper.wait(None)
    assert sent == [b"!"]


def test_sockets_are_asked_again_only_after_they_were_used(monkeypatch, sleeper):
    asked: list[object] = []
    monkeypatch.setattr(transport, "_readable", lambda one: bool(asked.append(one)))
    sleeper._poller = Poller()
    for _ in range(3):
        assert not sleeper.wait(0.001)
    assert len(asked) == 2, "the socket and its monitor"
    assert [*sleeper._endpoints[0].monitored()] == []
    del asked[:]
    assert not sleeper.wait(0.001)
    assert len(asked) == 2
