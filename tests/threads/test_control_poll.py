"""How long the control plane's ends sleep when they are to look again soon."""

from __future__ import annotations

import pytest
import zmq

from hvd_async.runtime import sockets


class Poller:
    """Has nothing to tell, and notes how many milliseconds it was to wait."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def poll(self, milliseconds: int | None) -> list[tuple[int, int]]:
        self.asked.append(milliseconds)
        return []


@pytest.mark.parametrize(
    ("timeout", "slept", "milliseconds"),
    [(None, 0.0, None), (0.0, 0.0, 0), (0.0002, 0.0002, 0), (0.001, 0.0, 1), (0.0042, 0.0, 5)],
)
def test_less_than_a_millisecond_is_slept_and_not_rounded_up(monkeypatch, timeout, slept, milliseconds):
    naps = [0.0]
    monkeypatch.setattr(sockets.time, "sleep", naps.append)
    endpoint = sockets.Endpoint(zmq.DEALER, zmq.EVENT_DISCONNECTED)
    sleeper = sockets.Sleeper(endpoint)
    try:
        sleeper._poller = poller = Poller()
        assert not sleeper.wait(timeout)
    finally:
        sleeper.close()
        endpoint.close()
    assert (sum(naps), poller.asked) == (slept, [milliseconds])
