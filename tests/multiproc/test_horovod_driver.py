"""Horovod's driver of elastic jobs, as ``scripts/install_horovod.sh`` builds it: no news of hosts is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from horovod.runner.elastic.driver import ElasticDriver

pytestmark = pytest.mark.multiproc

LIMIT = 20.0
"""Seconds that the driver has to look at hosts, which it does each second."""


class Hosts:
    """Discovery of hosts with one slot each."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict.fromkeys(self.names, 1)


class Rendezvous:
    """Takes what the driver decides."""

    def init(self, assignments: Any) -> None:
        """Begin a generation."""

    def stop(self) -> None:
        """End."""


class Notified:
    """Client of a rank's notification service.

    Attributes:
        news: set when it was notified of hosts.
    """

    def __init__(self) -> None:
        self.news = threading.Event()

    def notify_hosts_updated(self, timestamp: int, result: Any) -> None:
        self.news.set()


def test_a_host_that_is_found_while_ranks_get_their_numbers_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 dies. As the others are about to get new numbers, a host is found; the driver notifies the old rank 0."""
    hosts = Hosts("a", "b")
    driver = ElasticDriver(Rendezvous(), hosts, 1, 4)
    try:
        over = threading.Event()
        driver.start(2, lambda slot, events: (over.wait(LIMIT), (0, 0.0))[1])
        first = driver.get_coordinator_info().hostname
        (second,) = {"a", "b"} - {first}
        dead, survivor = Notified(), Notified()
        driver._worker_clients |= {(first, 0): dead, (second, 0): survivor}
        assign = driver._update_host_assignments

        def find_a_host_first(current: Any) -> Any:
            hosts.names.append("c")
            assert dead.news.wait(LIMIT), "the driver has not found the host"
            return assign(current)

        monkeypatch.setattr(driver, "_update_host_assignments", find_a_host_first)
        driver._host_manager.blacklist(first)
        driver.resume()
        assert [*driver.host_assignments] == [second]
        assert survivor.news.wait(LIMIT), "the survivor is not notified of the host"
    finally:
        over.set()
        driver.stop()
