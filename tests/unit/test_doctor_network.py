"""The doctor's measurement of a network: ranks as threads with a virtual clock, and real connections."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hvd_async.cli import doctor as command
from hvd_async.cli.main import main
from hvd_async.doctor import network
from hvd_async.doctor.network import Allreduce, Echo, Link, Measurement, in_a_job, judge_network, latency, pairs_of
from hvd_async.errors import EngineError

SOFTWARE = 0.002
"""Seconds that every collective takes."""


@dataclasses.dataclass
class Net:
    """Ranks that meet in every collective, whose duration follows from the bandwidths of the links."""

    size: int
    bandwidth: Callable[[int, int], float]
    now: float = 0.0

    def __post_init__(self) -> None:
        self._meet = threading.Barrier(self.size, timeout=30)
        self._slots: list[Any] = [None] * self.size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._meet.wait()
        found = list(self._slots)
        self._meet.wait()
        return found

    def pass_time(self, seconds: float) -> None:
        if self._meet.wait() == 0:
            self.now += SOFTWARE + seconds
        self._meet.wait()


class Ranks:
    """``network.Ranks`` of a ``Net``."""

    framework, transport = "paper 1.0", "Gloo"

    def __init__(self, net: Net, rank: int) -> None:
        self.net, self.rank, self.size = net, rank, net.size

    def gather(self, value: Any) -> list[Any]:
        return self.net.gather(self.rank, value)

    def allreduce(self, size: int) -> None:
        slowest = min(self.net.bandwidth(rank, (rank + 1) % self.size) for rank in range(self.size))
        self.net.pass_time(2 * (self.size - 1) / self.size * size / slowest)

    def alltoall(self, splits: Sequence[int]) -> None:
        sent = self.gather(list(splits))
        self.net.pass_time(
            max(size / self.net.bandwidth(i, j) for i, row in enumerate(sent) for j, size in enumerate(row))
        )


def measured(monkeypatch: pytest.MonkeyPatch, hosts: str, bandwidth: Callable[[int, int], float]) -> Measurement:
    """Measure between ranks on hosts whose names have one letter; all ranks agree."""
    net, own = Net(len(hosts), bandwidth), threading.local()
    monkeypatch.delenv("HOROVOD_HOSTNAME", raising=False)
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: net.now))
    monkeypatch.setattr(network.socket, "gethostname", lambda: own.host)
    found: list[Any] = [None] * len(hosts)

    def run(rank: int) -> None:
        own.host = hosts[rank]
        found[rank] = network.measure(Ranks(net, rank))  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(each == found[0] for each in found)
    assert isinstance(found[0], Measurement)
    return found[0]


def test_each_link_has_its_own_bandwidth(monkeypatch: pytest.MonkeyPatch):
    found = measured(monkeypatch, "abc", lambda i, j: 2.5e6 if (i, j) == (2, 0) else 25e6)
    links = {(link.sender, link.receiver): link for link in found.links}
    assert len(links) == 6
    for pair, link in links.items():
        assert link.bandwidth_bytes_s == pytest.approx(2.5e6 if pair == ("c", "a") else 25e6, rel=1e-4)
        assert link.latency_s is not None
        assert not link.failure
    assert found.bandwidth_bytes_s == pytest.approx(2.5e6, rel=1e-4)
    assert found.software_s == pytest.approx(SOFTWARE, rel=0.01)
    assert found.allreduce[-1].bandwidth_bytes_s == pytest.approx(2.5e6, rel=1e-3)
    assert found.allreduce[-1].duration_s >= network.LONG
    assert found.hosts == {"a": 1, "b": 1, "c": 1}


def test_the_first_rank_of_each_host_is_measured_and_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch):
    def refused(addresses: Sequence[str], port: int, token: bytes, owner: str) -> float:
        raise EngineError(f"{owner} is behind a wall")

    monkeypatch.setattr(network, "latency", refused)
    found = measured(monkeypatch, "aabb", lambda i, j: 1e9)
    assert {(link.sender, link.receiver) for link in found.links} == {("a[0]", "b[2]"), ("b[2]", "a[0]")}
    assert (found.hosts, found.latency_s) == ({"a": 2, "b": 2}, None)
    assert verdicts(found)["connections"] == "problem"
    assert "a[0] to b[2]: b[2] is behind a wall" in next(iter(judge_network(found))).fact


def test_one_rank_has_no_network():
    with pytest.raises(ValueError, match="at least two ranks"):
        network.measure(Ranks(Net(1, lambda i, j: 1e9), 0))  # type: ignore[arg-type]


def test_which_pairs():
    assert pairs_of(["a", "a"]) == [(0, 1), (1, 0)]
    assert pairs_of(["a", "b", "b"]) == [(0, 1), (1, 0)]
    many = pairs_of([f"h{place}" for place in range(20)])
    assert len(many) == 40
    assert set(many) >= {(0, 1), (1, 0), (19, 0), (0, 19)}


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"HOROVOD_SIZE": "1"}, False),
        ({"HOROVOD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "2"}, False),
    ],
)
def test_a_launcher_is_known_by_its_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], several: bool
):
    for name in (*network.SIZES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert in_a_job() == several


# -- judgement, tables and files ----------------------------------------------------------------------------------


def a_measurement(rates: Sequence[float] = (25e6, 25e6, 25e6), **changes: Any) -> Measurement:
    links = tuple(Link("a", f"b{place}", 0.0001 * (place + 1), rate, 2**23) for place, rate in enumerate(rates))
    sums = (Allreduce(2**20, 0.05, 24e6),)
    made = Measurement(0.0002, 25e6, {"a": 1, "b": 1}, 2, "torch 2", "Gloo", 0.001, links, sums, {"a": "x", "b": "x"})
    return msgspec.structs.replace(made, **changes)


def verdicts(found: Measurement) -> dict[str, str]:
    return {one.name: one.verdict.value for one in judge_network(found)}


def test_verdicts():
    assert verdicts(a_measurement()) == {"connections": "ok", "bandwidth": "ok", "versions": "ok"}
    assert verdicts(a_measurement((25e6, 12e6, 25e6)))["bandwidth"] == "note"
    assert verdicts(a_measurement((25e6, 13e6, 25e6)))["bandwidth"] == "ok"
    assert verdicts(a_measurement(versions={"a": "x", "b": "y"}))["versions"] == "problem"
    assert verdicts(a_measurement(hosts={"a": 2}))["hosts"] == "note"
    assert verdicts(a_measurement(hosts={"a": 2, "b": 1}, ranks=3))["hosts"] == "note"


def test_only_rank_0_prints_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A launcher ends all ranks when one has failed: also rank 0, which has to print the problem."""
    broken = Link("a", "b", None, 1e6, 2**20, "no route")
    found = a_measurement(links=(broken,), latency_s=None, bandwidth_bytes_s=1e6)
    monkeypatch.setattr(command, "in_a_job", lambda: True)
    monkeypatch.setattr(command, "measure_here", lambda: (1, found))
    assert main(["doctor"]) == 0
    assert not capsys.readouterr().out
    monkeypatch.setattr(command, "measure_here", lambda: (0, found))
    assert main(["doctor", "--network", str(tmp_path / "network.json")]) == 1
    shown = capsys.readouterr().out
    assert "a -> b             none                  8\n" in shown
    assert "Allreduce of 2 ranks (Gloo, torch 2)\n" in shown
    assert "1 MiB        50.0                192\n" in shown
    assert "a to b: no route" in shown
    written = json.loads((tmp_path / "network.json").read_text())
    assert (written["latency_s"], written["bandwidth_bytes_s"]) == (None, 1e6), "what advise reads"
    assert msgspec.convert(written, Measurement) == found, "what measure_hosts reads"


# -- connections --------------------------------------------------------------------------------------------------


def test_an_echo_is_known_by_its_token(monkeypatch: pytest.MonkeyPatch):
    with contextlib.closing(Echo()) as echo:
        assert 0 < latency(["127.0.0.1"], echo.port, echo.token, "b") < 1
        with pytest.raises(EngineError, match="something else answers at the address"):
            latency(["127.0.0.1"], echo.port, b"x" * network.TOKEN, "b")
        assert latency(["127.0.0.1"], echo.port, echo.token, "b") > 0
    monkeypatch.setattr(network, "PATIENCE", 0.5)
    with pytest.raises(EngineError, match="cannot be reached"):
        latency(["127.0.0.1"], echo.port, echo.token, "b")
