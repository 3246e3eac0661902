"""``Monitor`` on made-up counts: what it samples, writes and says, and its rule for permanent stragglers."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import random
import struct
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.compat.proto.event_pb2 import Event

import hvd_async
from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.monitor import Monitor, WaitReport
from hvd_async.monitor.sample import MOST_CULPRITS
from hvd_async.monitor.slow_ranks import BEGIN, WINDOWS, SlowRanks, advice, by_own_waits, by_waits_for, named
from hvd_async.stats import GossipStats, LeaderStats, Stats
from tests.conftest import examples

EAGER = {"algorithm": "eager", "quorum": "solo", "pace": "steps", "max_staleness": 16, "local_size": 1}
"""Settings of an EagerOptimizer."""

FIRST = Stats(steps=10, rounds=10, wait_s=1.0, held_s=(0.0, 0.0, 0.5, 0.0), contributors={4: 10}, staleness={0: 10})
LATER = {
    "steps": 60,
    "rounds": 60,
    "wait_s": 2.5,
    "held_s": (0.0, 0.3, 3.5, 0.0),
    "contributors": {4: 20, 3: 40},
    "staleness": {0: 40, 1: 15, 3: 5},
    "bytes_sent": 50_000_000,
}
"""Counts that have changed 5 seconds later."""
WAITS = "hvd_async_wait_seconds_total"


class Watched:
    """A wrapped optimizer as a monitor sees it, with made-up counts and a clock; two ranks share a host."""

    def __init__(
        self, counts: Stats | GossipStats | LeaderStats = FIRST, size: int = 4, place: int = 0, **settings: Any
    ):
        self.counts, self.seconds = counts, 100.0
        self._async = SimpleNamespace(settings={**EAGER, **settings})
        self.be(place, size)

    def be(self, place: int, size: int) -> None:
        self._async.rank_group = SimpleNamespace(index=place, ranks=tuple(range(size)))
        self._async.worker = SimpleNamespace(engine=SimpleNamespace(hosts=[f"n{rank // 2}" for rank in range(size)]))

    def stats(self) -> Any:
        return self.counts

    def monitor(self, **options: Any) -> Monitor:
        return Monitor(self, clock=lambda: self.seconds, **options)

    def train(self, seconds: float, **changes: Any) -> None:
        self.seconds += seconds
        self.counts = dataclasses.replace(self.counts, **changes)

    def train_windows(self, monitor: Monitor, windows: int, *each: float) -> None:
        """Windows of 10 steps and a second, in each of which ranks hold up the others by a number of seconds."""
        for _ in range(windows):
            held = tuple(a + b for a, b in zip(self.counts.held_s, each, strict=True))
            self.train(1.0, steps=self.counts.steps + 10, held_s=held)
            monitor.sample()


def parsed(path: pathlib.Path | None = None, text: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of every sample, as Prometheus' own client reads them."""
    families = text_string_to_metric_families(path.read_text() if path else text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for one in families for s in one.samples}


def scalars_in(folder: pathlib.Path) -> list[tuple[int, str, Any]]:
    """(step, tag, value) of every scalar in a folder of TensorBoard events."""
    found: list[tuple[int, str, Any]] = []
    for path in folder.glob("events.out.tfevents.*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            found += [(event.step, value.tag, pytest.approx(value.simple_value)) for value in event.summary.value]
            content = content[16 + length :]
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings."""
    lines: list[str] = []
    for module in ("slow_ranks", "sinks", "monitor"):
        monkeypatch.setattr(f"hvd_async.monitor.{module}.warn", lines.append)
    return lines


# -- samples ------------------------------------------------------------------------------------------------------


def test_a_sample_is_the_difference_of_two_counts():
    optimizer = Watched()
    monitor = optimizer.monitor(every=3)
    optimizer.train(5.0, **LATER)
    monitor.step()
    monitor.step()
    assert monitor.last is None
    assert monitor.values() == {}
    monitor.step()
    assert monitor.last is not None
    assert (monitor.last.step, monitor.last.steps, monitor.last.seconds) == (60, 50, 5.0)
    expected = {"steps_per_second": 10.0, "own_wait_share": 0.3, "megabytes_per_second": 10.0}
    expected |= {"contributors": (4 * 10 + 3 * 40) / 50, "staleness_mean": (15 + 3 * 5) / 50, "staleness_max": 3}
    expected |= {f"wait_share_for/rank_{rank}": held / 15 for rank, held in enumerate((0.0, 0.3, 3.0, 0.0))}
    assert monitor.values(prefix="") == pytest.approx({**expected, "resets": 0, "gradients_lost": 0})
    assert monitor.values()["hvd_async/steps_per_second"] == 10.0


def test_gossip_and_leaders_have_values_of_their_own():
    gossip = Watched(GossipStats(waited_for=(0.0, 1.0)), size=2, algorithm="sgp")
    leader = Watched(LeaderStats(distance=2.0, distances=2), size=2, algorithm="lsgd")
    first, second = gossip.monitor(), leader.monitor()
    gossip.train(4.0, steps=8, waited_for=(0.0, 2.0), staleness={1: 4}, wait_s=1.0)
    leader.train(4.0, steps=8, distance=3.0, distances=4, bytes_received=8)
    found, led = first.sample(), second.sample()
    assert found is not None
    assert led is not None
    assert (found.shares(), found.staleness_mean, found.contributors, found.leader_distance) == (
        [0, 0.25],
        1,
        None,
        None,
    )
    assert (led.leader_distance, led.waits, led.bytes_per_s) == (4.0, (), 2.0)


def test_a_monitor_does_not_keep_its_optimizer_alive(tmp_path: pathlib.Path):
    monitor = Monitor(Watched(), prometheus=tmp_path / "m.prom")
    gc.collect()
    monitor.step()
    assert monitor.sample() is None
    monitor.close()
    monitor.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 0}, "every must be a number of steps, at least 1, got 0"),
        ({"window": 2.5}, "window must be a number of steps, at least 1, got 2.5"),
        ({"seconds": 0}, "seconds must be above 0, got 0"),
        ({"prometheus_port": 70000}, "prometheus_port must be a port from 1 to 65535, or 0, got 70000"),
        ({"optimizer": object()}, "Monitor needs an optimizer wrapped by this library, got object"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=error):
        hvd_async.Monitor(**{"optimizer": Watched(), **options})


# -- files and the endpoint ---------------------------------------------------------------------------------------


def test_files_and_the_endpoint_hold_the_last_sample(tmp_path: pathlib.Path):
    optimizer, path = Watched(), tmp_path / "a" / "metrics.prom"
    with optimizer.monitor(prometheus=path, tensorboard=tmp_path / "tb", prometheus_port=0) as monitor:
        assert not path.exists()
        optimizer.train(5.0, **LATER)
        monitor.record_consensus_distance(0.25)
        monitor.sample()
        found = parsed(path)
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor.port}/metrics", timeout=10) as answer:
            assert parsed(text=answer.read().decode()) == found
        assert found.pop(("hvd_async_sample_timestamp_seconds", (("rank", "0"),))) > 1e9
        totals = {"steps": 60, "rounds": 60, "own_wait_seconds": 2.5, "transferred_bytes": 50_000_000}
        totals |= {"resets": 0, "gradients_lost": 0, "gradients_skipped": 0}
        values = {f"{name}_total": value for name, value in totals.items()}
        values |= {"steps_per_second": 10, "contributors": 3.2, "staleness_mean": 0.6, "staleness_max": 3}
        values |= {"consensus_distance": 0.25}
        expected = {(f"hvd_async_{name}", (("rank", "0"),)): value for name, value in values.items()}
        for culprit, host, seconds in (("1", "n0", 0.3), ("2", "n1", 3.0)):  # (no rank waited for the others)
            expected[WAITS, (("culprit", culprit), ("host", host), ("waiter", "all"))] = seconds
        assert found == pytest.approx(expected)
        assert [one.name for one in path.parent.iterdir()] == ["metrics.prom"], "no other file is left"
        optimizer.train(1.0, steps=70, held_s=(0.0, 0.3, 4.5, 0.0))
        monitor.step()
    assert monitor.port is None
    last = parsed(path)[WAITS, (("culprit", "2"), ("host", "n1"), ("waiter", "all"))]
    assert last == pytest.approx(4.0), "closing takes a last sample"
    tag = "hvd_async/wait_share_for/rank_2"
    assert [one for one in scalars_in(tmp_path / "tb") if one[1] == tag] == [(60, tag, 3.0 / 15), (70, tag, 1.0 / 3)]


def test_the_number_of_series_is_bounded(tmp_path: pathlib.Path):
    size = 3 * MOST_CULPRITS
    optimizer = Watched(Stats(held_s=(0.0,) * size), size=size)
    monitor = optimizer.monitor(prometheus=tmp_path / "m.prom")
    before: dict[Any, float] = {}
    for number in range(1, 4):
        optimizer.train(1.0, held_s=tuple(float(number * (1 + (place + number) % size)) for place in range(size)))
        monitor.sample()
        waits = {key: value for key, value in parsed(tmp_path / "m.prom").items() if key[0] == WAITS}
        assert len(waits) == MOST_CULPRITS + 1
        assert all(value >= before.get(key, 0.0) for key, value in waits.items()), "counters rise"
        before = waits


def test_other_ranks_write_only_if_all_do_and_nothing_twice(tmp_path: pathlib.Path):
    optimizer = Watched(place=2)
    optimizer.monitor(prometheus=tmp_path / "m.prom", tensorboard=tmp_path / "tb").sample()
    assert not list(tmp_path.iterdir())
    loud = optimizer.monitor(prometheus=tmp_path / "m.prom", all_ranks=True, name="d")
    loud.sample()
    optimizer.be(1, 3)
    optimizer.train(5.0, **LATER)
    loud.sample()
    (path,) = tmp_path.iterdir()
    assert path.name == "m.rank1.prom", "a rank with a new number leaves its file"
    found = parsed(path)
    assert found["hvd_async_steps_total", (("optimizer", "d"), ("rank", "1"))] == 60
    assert WAITS not in {name for name, _ in found}, "the first rank reports what all ranks know"


def test_a_file_that_cannot_be_written_is_dropped_and_training_continues(tmp_path: pathlib.Path, said: list[str]):
    optimizer = Watched()
    monitor = optimizer.monitor(prometheus=tmp_path / "m.prom", tensorboard=tmp_path / "tb")
    (tmp_path / "m.prom").mkdir()
    monitor.sample()
    monitor.sample()
    assert len(said) == 1
    assert "the monitor stops writing to prometheus=" in said[0]
    assert {path.name for path in tmp_path.iterdir()} == {"m.prom", "tb"}, "nothing is left of it"
    assert scalars_in(tmp_path / "tb")


# -- warnings, and membership changes -----------------------------------------------------------------------------


def test_a_permanent_straggler_is_named_once_and_again_when_that_changes(said: list[str]):
    optimizer = Watched()
    monitor = optimizer.monitor(window=10)
    optimizer.train_windows(monitor, 2, 0.0, 0.0, 0.0, 0.93)
    assert not said
    optimizer.train_windows(monitor, 5, 0.0, 0.0, 0.0, 0.93)
    assert said == [
        "the other ranks wait 31% of their time, 31 ms a step, for rank 3 on host n1; "
        'pace="rounds" would let it contribute fewer gradients instead of delaying the others'
    ]
    optimizer.train_windows(monitor, 9, 0.0, 0.0, 0.0, 0.2)
    assert len(said) == 1, "between the two limits nothing changes"
    optimizer.train_windows(monitor, 9, 0.0, 0.0, 0.0, 0.1)
    assert said[1:] == ["the ranks do not wait for one of them more than for others any more"]
    optimizer.train_windows(monitor, 9, 0.0, 0.9, 0.0, 0.0)
    assert "for rank 1 on host n0;" in said[2]


@pytest.mark.parametrize(("place", "warn"), [(0, False), (1, True)])
def test_only_the_first_rank_warns_and_not_if_it_must_not(said: list[str], place: int, warn: bool):
    optimizer = Watched(place=place)
    optimizer.train_windows(optimizer.monitor(window=10, warn=warn), 9, 0.0, 0.0, 0.0, 2.0)
    assert not said


def test_it_continues_among_other_ranks(said: list[str], tmp_path: pathlib.Path):
    """Elastic training: rank 1 of 4 becomes rank 0 of 3, and seconds held start again at 0."""
    optimizer = Watched(Stats(held_s=(0.0,) * 4), place=1)
    monitor = optimizer.monitor(window=10, prometheus=tmp_path / "m.prom")
    optimizer.train_windows(monitor, 4, 0.0, 0.0, 0.5, 2.0)
    optimizer.be(0, 3)
    optimizer.train(1.0, held_s=(0.0, 0.0, 3.0), resets=1)
    monitor.sample()
    found = parsed(tmp_path / "m.prom")
    assert found["hvd_async_resets_total", (("rank", "0"),)] == 1
    waits = {dict(labels)["culprit"]: value for (name, labels), value in found.items() if name == WAITS}
    assert waits == {"2": 2.0 + 3.0, "3": 8.0}
    optimizer.train_windows(monitor, 3, 0.0, 0.0, 1.5)
    assert len(said) == 1
    assert "for rank 2 on host n1;" in said[0]


def test_a_port_that_another_rank_still_has_is_opened_once_it_has_left(tmp_path: pathlib.Path, said: list[str]):
    """Elastic x ports: rank 1 becomes rank 0 while the old rank 0 has not closed its port yet."""
    other, optimizer = Watched(), Watched(place=1)
    first = other.monitor(prometheus_port=0)
    monitor = optimizer.monitor(prometheus=tmp_path / "m.prom", prometheus_port=first.port)
    port = first.port
    optimizer.be(0, 3)
    monitor.sample()
    assert (tmp_path / "m.prom").exists(), "the file does not wait for the port"
    assert monitor.port is None
    assert len(said) == 1
    assert f"cannot write to prometheus_port={port} yet" in said[0]
    first.close()
    monitor.sample()
    assert monitor.port == port
    monitor.close()


def test_gossip_is_judged_by_the_reports_of_all_ranks(said: list[str]):
    optimizer = Watched(GossipStats(waited_for=(0.0,) * 4), algorithm="dpsgd")
    monitor = optimizer.monitor()
    for number in (1, 2, 3):
        optimizer.train(10.0, steps=100 * number, wait_s=3.0 * number)
        own = monitor.report()
        assert own == WaitReport(0, pytest.approx(0.3), 0.1)
        shares = {2: 0.0, 0: own.share, 1: 0.3, 3: 0.3}
        monitor.compare([WaitReport(rank, share, 0.1) for rank, share in shares.items()])
        monitor.sample()
        assert len(said) == (number >= 2)
    assert said[0].startswith("the other ranks wait 30% of their time, 30 ms a step, for rank 2 on host n1; Gossip")
    with pytest.raises(ValueError, match=r"compare\(\) lacks the report of ranks 1, 3"):
        monitor.compare([WaitReport(0, 0.0, 0.1), WaitReport(2, 0.0, 0.1)])


# -- the rule for permanent stragglers, and the advice --------------------------------------------------------------


def noise(size: int, low: float, high: float) -> st.SearchStrategy[list[float]]:
    """A share for each rank."""
    return st.lists(st.floats(low, high), min_size=size, max_size=size)


@given(size=st.integers(2, 12), level=st.floats(0.0, 1.0), data=st.data())
@settings(max_examples=examples(200))
def test_ranks_that_are_even_are_never_called_slow(size, level, data):
    """However long the others wait for them, if not twice as long for one as for another."""
    by_others, by_own = SlowRanks(size), SlowRanks(size)
    for _ in range(3 * WINDOWS):
        shares = [level * x for x in data.draw(noise(size, 0.5, 1.0))]
        assert not by_others.judge(by_waits_for(shares))
        assert not by_own.judge(by_own_waits(shares))
    assert not by_others.slow | by_own.slow


@given(size=st.integers(2, 12), slow=st.integers(0, 11), share=st.floats(BEGIN, 1.0), data=st.data())
@settings(max_examples=examples(200))
def test_a_permanent_straggler_is_always_found(size, slow, share, data):
    slow %= size
    rule, own = SlowRanks(size), SlowRanks(size)
    changes = []
    for _ in range(2 * WINDOWS):
        shares = [share * x for x in data.draw(noise(size, 0.0, 0.3))]
        shares[slow] = share
        changes.append(rule.judge(by_waits_for(shares)))
        waits = [share + 0.1 - 0.05 * x / share for x in shares]  # the others wait, one as long as another
        waits[slow] = 0.0
        own.judge(by_own_waits(waits))
    assert rule.slow == own.slow == {slow}
    assert changes == [number == WINDOWS - 1 for number in range(2 * WINDOWS)], "and that changes once"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_straggler_that_is_another_rank_in_each_step_is_not_called_slow(size):
    """One random rank sleeps in every step, over 200 windows; all others wait for it."""
    draw, rule = random.Random(size), SlowRanks(size)
    for _ in range(200):
        steps = [draw.randrange(size) for _ in range(50)]
        rule.judge(by_waits_for([steps.count(rank) / 50 for rank in range(size)]))
        assert not rule.slow


def test_several_slow_ranks_are_found_together():
    rule = SlowRanks(8)
    for _ in range(WINDOWS):
        rule.judge(by_waits_for([0.2, 0.2, *[0.0] * 6]))
    assert rule.slow == {0, 1}


# -- words --------------------------------------------------------------------------------------------------------


def test_ranks_are_named_by_host():
    assert named([3], range(4), ["a"] * 4) == "rank 3 on host a"
    assert named([2, 0, 1], [4, 5, 9], ["a", "a", "b"]) == "ranks 4, 5 on host a and rank 9 on host b"


GIVES = "would let it contribute fewer gradients instead of delaying the others"


@pytest.mark.parametrize(
    ("settings", "slow", "expected"),
    [
        ({}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": "auto"}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": 3}, 2, f'quorum="solo", pace="rounds" {GIVES}'),
        ({"quorum": 0.75}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": "majority"}, 1, f'quorum="solo", pace="rounds" {GIVES}'),
        ({"quorum": "all"}, 1, f'quorum="solo", pace="rounds" {GIVES}'),
        ({"max_staleness": 0}, 1, f'quorum="solo", pace="rounds", max_staleness=16 {GIVES}'),
        ({"local_size": 2}, 1, f'pace="rounds" {GIVES.replace("the others", "the other hosts")}'),
        ({"pace": "rounds"}, 1, "a higher max_staleness (now 16) would have rounds wait for it later"),
        ({"pace": "rounds", "quorum": "majority"}, 1, 'quorum="solo" would let rounds start without it'),
        ({"algorithm": "lsgd"}, 1, ""),
        ({"algorithm": "adpsgd", "max_local_steps": 4}, 1, "a higher max_local_steps (now 4) would make such waits "
                                                            "rarer"),
    ],
)  # fmt: skip
def test_the_advice_fits_the_mode(settings, slow, expected):
    assert advice({**EAGER, **settings}, 4, slow) == expected


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_there_is_advice_wherever_a_step_waits_for_others(algorithm):
    found = advice({**EAGER, "algorithm": algorithm}, 4, 1)
    assert bool(found) == (ALGORITHMS[algorithm].waits_for != "none")
