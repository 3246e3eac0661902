"""The doctor's measurement of a network: ranks as threads, collectives on a clock of their own, real connections."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_async.doctor import network, network_job, wire
from hvd_async.doctor.findings import Verdict
from hvd_async.doctor.network import Allreduce, Link, Measurement, measure, pairs_of
from hvd_async.doctor.processes import RESULT, Outcome
from hvd_async.errors import EngineError

SOFTWARE = 0.002
"""Seconds that every collective takes."""


class Net:
    """Ranks that meet in every collective; how long it takes by the links' bandwidths."""

    def __init__(self, hosts: Sequence[str], bandwidth: Callable[[int, int], float]) -> None:
        self.hosts, self.bandwidth, self.ranks = hosts, bandwidth, len(hosts)
        self._meet = threading.Barrier(self.ranks, timeout=30)
        self._slots: list[Any] = [None] * self.ranks
        self.now = 0.0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._meet.wait()
        found = list(self._slots)
        self._meet.wait()
        return found

    def pass_time(self, rank: int, seconds: float) -> None:
        if self._meet.wait() == 0:
            self.now += seconds
        self._meet.wait()


class Fake:
    framework = "paper 1.0"

    def __init__(self, net: Net, rank: int) -> None:
        self._net, self._rank = net, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._net.ranks

    def transport(self) -> str:
        return "Gloo"

    def gather(self, value: Any) -> list[Any]:
        return self._net.exchange(self._rank, value)

    def allreduce(self, size: int) -> None:
        ranks, net = self._net.ranks, self._net
        slowest = min(net.bandwidth(rank, (rank + 1) % ranks) for rank in range(ranks))
        net.pass_time(self._rank, SOFTWARE + 2 * (ranks - 1) / ranks * size / slowest)

    def alltoall(self, splits: Sequence[int]) -> None:
        sent = self._net.exchange(self._rank, list(splits))
        times = [size / self._net.bandwidth(i, j) for i, row in enumerate(sent) for j, size in enumerate(row)]
        self._net.pass_time(self._rank, SOFTWARE + max(times))


def measured(monkeypatch, hosts: Sequence[str], bandwidth: Callable[[int, int], float]) -> list[Measurement]:
    """What every rank has found."""
    net = Net(hosts, bandwidth)
    own = threading.local()
    monkeypatch.setattr(network, "host_name", lambda: own.host)
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: net.now))
    found: list[Any] = [None] * len(hosts)

    def run(rank: int) -> None:
        own.host = hosts[rank]
        found[rank] = measure(Fake(net, rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_each_link_has_its_own_bandwidth(monkeypatch):
    found = measured(monkeypatch, ["a", "b", "c"], lambda i, j: 2.5e6 if (i, j) == (2, 0) else 25e6)
    assert found[0] == found[1] == found[2]
    links = {(link.sender, link.receiver): link for link in found[0].links}
    assert len(links) == 6
    for pair, link in links.items():
        expected = 2.5e6 if pair == ("c", "a") else 25e6
        assert link.bandwidth_bytes_s == pytest.approx(expected, rel=1e-4)
        assert link.latency_s is not None
        assert not link.failure
    assert found[0].bandwidth_bytes_s == pytest.approx(2.5e6, rel=1e-4)
    assert found[0].software_s == pytest.approx(SOFTWARE, rel=0.01)
    assert found[0].allreduce[-1].bandwidth_bytes_s == pytest.approx(2.5e6, rel=1e-3)
    assert found[0].allreduce[-1].duration_s >= network.LONG
    assert found[0].hosts == {"a": 1, "b": 1, "c": 1}


def test_of_each_host_the_first_rank_is_measured(monkeypatch):
    found = measured(monkeypatch, ["a", "a", "b", "b"], lambda i, j: 1e9)[3]
    assert {(link.sender, link.receiver) for link in found.links} == {("a[0]", "b[2]"), ("b[2]", "a[0]")}
    assert found.hosts == {"a": 2, "b": 2}


def test_a_host_that_cannot_be_reached(monkeypatch):
    def refused(addresses: Sequence[str], port: int, token: bytes, whose: str) -> float:
        raise EngineError(f"{whose} is behind a wall")

    monkeypatch.setattr(network, "latency", refused)
    found = measured(monkeypatch, ["a", "b"], lambda i, j: 1e9)[0]
    assert found.latency_s is None
    problems = [one for one in network_job.judge_network(found) if one.verdict is Verdict.PROBLEM]
    assert [one.name for one in problems] == ["connections", "connections"]
    assert "a to b: b is behind a wall" in problems[0].fact


def test_one_rank_has_no_network():
    with pytest.raises(ValueError, match="two ranks at the least"):
        measure(Fake(Net(["a"], lambda i, j: 1e9), 0))


def test_which_pairs():
    assert pairs_of(["a", "a"]) == [(0, 1), (1, 0)]
    assert pairs_of(["a", "b", "b"]) == [(0, 1), (1, 0)]
    many = pairs_of([f"h{place}" for place in range(20)])
    assert len(many) == 40
    assert set(many) >= {(0, 1), (1, 0), (19, 0), (0, 19)}


# -- what is made of it ----------------------------------------------------------------------------------------


def a_measurement(rates: Sequence[float] = (25e6, 25e6, 25e6), **changes: Any) -> Measurement:
    links = tuple(Link("a", f"b{place}", 0.0001 * (place + 1), rate, 2**23) for place, rate in enumerate(rates))
    sums = (Allreduce(2**20, 0.05, 24e6),)
    made = Measurement({"a": 1, "b": 1}, 2, "torch 2.13.0", "Gloo", 0.001, links, sums, {"a": "x", "b": "x"})
    return dataclasses.replace(made, **changes)


def verdicts(found: Measurement) -> dict[str, str]:
    return {one.name: one.verdict.value for one in network_job.judge_network(found)}


def test_a_network_that_is_well():
    assert verdicts(a_measurement()) == {"connections": "ok", "bandwidth": "ok", "versions": "ok"}


def test_a_slow_link_is_named():
    found = network_job.judge_network(a_measurement((25e6, 12e6, 25e6)))
    (slow,) = [one for one in found if one.name == "bandwidth"]
    assert slow.verdict is Verdict.NOTE
    assert slow.fact.startswith("a to b1: 96 Mbit/s")
    assert verdicts(a_measurement((25e6, 13e6, 25e6)))["bandwidth"] == "ok"


def test_versions_that_differ_and_hosts_with_several_ranks():
    assert verdicts(a_measurement(versions={"a": "x", "b": "y"}))["versions"] == "problem"
    assert verdicts(a_measurement(hosts={"a": 2}))["hosts"] == "note"
    assert verdicts(a_measurement(hosts={"a": 2, "b": 1}, ranks=3))["hosts"] == "note"


def test_the_file_that_advise_reads():
    made = a_measurement((25e6, 12.5e6))
    value = made.as_json()
    assert (value["latency_s"], value["bandwidth_bytes_s"]) == (pytest.approx(0.00015), 12.5e6)
    assert Measurement.from_json(value) == made
    del value["links"]
    with pytest.raises(ValueError, match="no measurement of a network: 'links'"):
        Measurement.from_json(value)


def test_the_tables_units():
    (_, header, links), (title, _, sums) = network_job.tables(a_measurement())
    assert header == ["from -> to", "latency, ms", "bandwidth, Mbit/s"]
    assert links[0] == ["a -> b0", "0.100", "200"]
    assert sums == [["8 bytes", "1.0", ""], ["1 MiB", "50.0", "192"]]
    assert "2 ranks (Gloo, torch 2.13.0)" in title


def test_ranks_and_hosts(monkeypatch):
    assert network_job.hosts_of_ranks("h1:1,10.0.0.2:2") == ["h1", "10.0.0.2", "10.0.0.2"]
    for name in network_job.SIZES:
        monkeypatch.delenv(name, raising=False)
    assert not network_job.in_a_job()
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    assert not network_job.in_a_job()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert network_job.in_a_job()


def test_a_job_on_hosts_is_started_and_its_result_read(monkeypatch):
    given: list[Any] = []

    def run(command: Sequence[str], limit: float, env: Any) -> Outcome:
        given.extend([list(command), limit])
        return Outcome(0, f"[0]<stdout>:{RESULT}{json.dumps(a_measurement().as_json())}\n", 9.0)

    monkeypatch.setattr(network_job, "framework_here", lambda: "torch")
    monkeypatch.setattr(network_job, "run_limited", run)
    assert network_job.measure_hosts("h1:1,h2:2", 60, ["--ssh-port", "22"]) == a_measurement()
    command, limit = given
    assert command[command.index("-np") + 1] == "3"
    assert command[command.index("-H") + 1] == "h1:1,h2:2"
    assert command[command.index("--ssh-port") + 1] == "22"
    assert limit == 60 + 2 * network_job.A_LINK


def test_a_job_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(network_job, "framework_here", lambda: "torch")
    ended = Outcome(255, "ssh: connect to host h2 port 22: Connection refused\n", 9.0)
    monkeypatch.setattr(network_job, "run_limited", lambda *_: ended)
    with pytest.raises(EngineError, match="has failed, exit status 255") as told:
        network_job.measure_hosts("h1:1,h2:1", 60, [])
    assert "Connection refused" in str(told.value)


# -- connections -----------------------------------------------------------------------------------------------


def test_an_echo_is_known_by_its_token():
    echo = wire.Echo()
    try:
        assert wire.latency(["127.0.0.1"], echo.port, echo.token, "b") > 0
        with pytest.raises(EngineError, match="something else answers"):
            wire.latency(["127.0.0.1"], echo.port, b"x" * wire.TOKEN, "b")
        assert wire.latency(["127.0.0.1"], echo.port, echo.token, "b") > 0
    finally:
        echo.close()


def test_an_echo_that_is_gone(monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    echo = wire.Echo()
    echo.close()
    with pytest.raises(EngineError, match="cannot be reached"):
        wire.latency(["127.0.0.1"], echo.port, echo.token, "b")
