"""``Monitor``, on counts that a test makes up: what it samples, writes and says, and what becomes of it."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hvd_async
from hvd_async.monitor import Monitor, WaitReport
from hvd_async.monitor import slow_ranks as warner
from hvd_async.monitor.sample import Counts, Sample
from hvd_async.monitor.sinks import MOST_CULPRITS, Destinations, Endpoint, Metric, Sinks, Totals, text_of
from hvd_async.stats import GossipStats, LeaderStats, Stats
from tests.unit.monitored import Clock, Optimizer
from tests.unit.test_runner_report import scalars_in

FIRST = Stats(steps=10, rounds=10, wait_s=1.0, held_s=(0.0, 0.0, 0.5, 0.0), contributors={4: 10}, staleness={0: 10})
LATER = Stats(
    steps=60,
    rounds=60,
    wait_s=2.5,
    held_s=(0.0, 0.3, 3.5, 0.0),
    contributors={4: 20, 3: 40},
    staleness={0: 40, 1: 15, 3: 5},
    bytes_sent=50_000_000,
    gradients_skipped=2,
)


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of every sample, as Prometheus' own client reads them."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for one in families for s in one.samples}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was written to stderr."""
    lines: list[str] = []
    monkeypatch.setattr(warner, "warn", lines.append)
    return lines


def test_a_sample_is_the_difference_of_two_counts():
    clock, optimizer = Clock(), Optimizer(FIRST)
    monitor = Monitor(optimizer, every=3, clock=clock)
    optimizer.now, clock.now = LATER, 105.0
    monitor.step()
    monitor.step()
    assert monitor.last is None
    monitor.step()
    found = monitor.last
    assert found is not None
    assert (found.step, found.steps, found.seconds, found.steps_per_s) == (60, 50, 5.0, 10.0)
    assert found.wait_share == pytest.approx(0.3)
    assert found.shares() == pytest.approx([0.0, 0.3 / 15, 3.0 / 15, 0.0])
    assert found.contributors == pytest.approx((4 * 10 + 3 * 40) / 50)
    assert found.staleness_mean == pytest.approx((15 + 3 * 5) / 50)
    assert found.staleness_max == 3
    assert found.bytes_per_s == 10_000_000


def test_seconds_take_the_place_of_steps():
    clock, optimizer = Clock(), Optimizer(FIRST)
    monitor = Monitor(optimizer, every=1, seconds=2.0, clock=clock)
    clock.now += 1.9
    monitor.step()
    assert monitor.last is None
    clock.now += 0.1
    monitor.step()
    assert monitor.last is not None


def test_gossip_and_leaders_have_values_of_their_own():
    clock = Clock()
    gossip = Optimizer(GossipStats(waited_for=(0.0, 1.0)), size=2, algorithm="sgp")
    leader = Optimizer(LeaderStats(distance=2.0, distances=2), size=2, algorithm="lsgd")
    monitors = [Monitor(one, clock=clock) for one in (gossip, leader)]
    clock.now += 4.0
    gossip.now = GossipStats(steps=8, waited_for=(0.0, 2.0), staleness={1: 4}, wait_s=1.0)
    leader.now = LeaderStats(steps=8, distance=3.0, distances=4, bytes_received=8)
    first, second = (one.sample() for one in monitors)
    assert first is not None
    assert second is not None
    assert first.shares() == [0.0, 0.25]
    assert (first.staleness_mean, first.contributors, first.leader_distance) == (1.0, None, None)
    assert (second.leader_distance, second.waits, second.bytes_per_s) == (4.0, (), 2.0)


def test_a_consensus_distance_is_shown_from_when_it_was_measured(tmp_path: pathlib.Path):
    path, clock, optimizer = tmp_path / "metrics.prom", Clock(), Optimizer(FIRST)
    key = ("hvd_async_consensus_distance", (("rank", "0"),))
    with Monitor(optimizer, prometheus=path, tensorboard=tmp_path / "tb", clock=clock) as monitor:
        monitor.sample()
        assert key not in parsed(path.read_text())
        monitor.record_consensus_distance(0.25)
        for _ in range(2):
            sample = monitor.sample()
            assert sample is not None
            assert sample.consensus_distance == 0.25
            assert parsed(path.read_text())[key] == 0.25
    drawn = [value for _, tag, value in scalars_in(tmp_path / "tb") if tag == "hvd_async/consensus_distance"]
    assert drawn == [0.25, 0.25]


def test_files_hold_the_last_sample(tmp_path: pathlib.Path):
    clock, optimizer = Clock(), Optimizer(FIRST)
    path = tmp_path / "a" / "metrics.prom"
    with Monitor(optimizer, prometheus=path, tensorboard=tmp_path / "tb", clock=clock) as monitor:
        assert not path.exists()
        optimizer.now, clock.now = LATER, 105.0
        monitor.sample()
        found = parsed(path.read_text())
        assert found["hvd_async_steps_total", (("rank", "0"),)] == 60
        assert found["hvd_async_steps_per_second", (("rank", "0"),)] == 10
        assert found["hvd_async_staleness_max", (("rank", "0"),)] == 3
        waits = "hvd_async_wait_seconds_total"
        culprit = (("culprit", "2"), ("host", "n1"), ("waiter", "all"))
        assert found[waits, culprit] == pytest.approx(3.0)
        assert not [key for key in found if key[0] == waits and ("culprit", "0") in key[1]], "nobody waited for it"
        assert [one.name for one in path.parent.iterdir()] == ["metrics.prom"], "nothing is left beside it"
        optimizer.now, clock.now = dataclasses.replace(LATER, steps=70, held_s=(0.0, 0.3, 4.5, 0.0)), 106.0
        monitor.step()
    assert parsed(path.read_text())[waits, culprit] == pytest.approx(4.0), "closing takes a last sample"
    shown = [(step, tag, value) for step, tag, value in scalars_in(tmp_path / "tb") if "rank_2" in tag]
    assert shown == [
        (60, "hvd_async/wait_share_for/rank_2", 3.0 / 15),
        (70, "hvd_async/wait_share_for/rank_2", 1.0 / 3),
    ]


def test_labels_are_escaped_and_names_follow_the_conventions():
    hostile = 'a"b\\n\nd'  # (a backslash and an n, then a line's end)
    text = text_of([Metric("x_total", "counter", "a\\b\nc", [({"host": hostile}, 1.5)]), Metric("y", "gauge", "", [])])
    assert parsed(text) == {("hvd_async_x_total", (("host", hostile),)): 1.5}
    clock, optimizer = Clock(), Optimizer(FIRST)
    sample = Monitor(optimizer, clock=clock).sample()
    assert sample is not None
    for metric in Totals().metrics(sample, 0, 0.0):
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name


def test_there_are_no_more_series_than_a_bound(tmp_path: pathlib.Path):
    size, clock = 3 * MOST_CULPRITS, Clock()
    optimizer = Optimizer(Stats(held_s=(0.0,) * size), size=size)
    monitor = Monitor(optimizer, prometheus=tmp_path / "m.prom", clock=clock)
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for number in range(1, 4):
        clock.now += 1.0
        optimizer.now = Stats(held_s=tuple(float(number * (1 + (place + number) % size)) for place in range(size)))
        monitor.sample()
        found = parsed((tmp_path / "m.prom").read_text())
        waits = {key: value for key, value in found.items() if key[0] == "hvd_async_wait_seconds_total"}
        assert len(waits) == MOST_CULPRITS + 1
        assert all(value >= before.get(key, 0.0) for key, value in waits.items()), "counters rise"
        before = waits


def test_ranks_that_are_not_the_first_write_only_if_all_do(tmp_path: pathlib.Path):
    optimizer = Optimizer(FIRST, place=1)
    quiet = Monitor(optimizer, prometheus=tmp_path / "m.prom", tensorboard=tmp_path / "tb")
    quiet.sample()
    assert not list(tmp_path.iterdir())
    loud = Monitor(optimizer, prometheus=tmp_path / "m.prom", all_ranks=True, name="d")
    loud.sample()
    (path,) = tmp_path.iterdir()
    assert path.name == "m.rank1.prom"
    assert parsed(path.read_text())["hvd_async_steps_total", (("optimizer", "d"), ("rank", "1"))] == 10


def test_the_endpoint_serves_what_the_file_holds(tmp_path: pathlib.Path):
    clock, optimizer = Clock(), Optimizer(FIRST)
    with Monitor(optimizer, prometheus=tmp_path / "m.prom", prometheus_port=0, clock=clock) as monitor:
        optimizer.now, clock.now = LATER, 105.0
        monitor.sample()
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor.port}/metrics", timeout=10) as answer:
            served = answer.read().decode()
    assert parsed(served) == parsed((tmp_path / "m.prom").read_text())
    assert monitor.port is None


def test_a_last_sample_that_fails_keeps_no_port(monkeypatch: pytest.MonkeyPatch):
    def fails() -> Stats:
        raise RuntimeError("a rank is lost")

    optimizer = Optimizer(FIRST)
    monitor = Monitor(optimizer, prometheus_port=0)
    monitor.step()
    monkeypatch.setattr(optimizer, "stats", fails)
    with pytest.raises(RuntimeError, match="is lost"):
        monitor.close()
    assert monitor.port is None


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"pip install 'hvd_async\[monitor\]'"):
        Monitor(Optimizer(FIRST), prometheus_port=0)


def test_a_file_that_cannot_be_written_is_dropped_and_training_goes_on(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("hvd_async.monitor.sinks.warn", lines.append)
    optimizer = Optimizer(FIRST)
    monitor = Monitor(optimizer, prometheus=tmp_path / "m.prom", tensorboard=tmp_path / "tb")
    (tmp_path / "m.prom").mkdir()
    monitor.sample()
    monitor.sample()
    assert len(lines) == 1
    assert "the monitor writes no more to prometheus=" in lines[0]
    assert not list(tmp_path.glob(".*")), "nor is anything left of it"
    assert len({step for step, _, _ in scalars_in(tmp_path / "tb")}) == 1


def test_what_all_ranks_know_alike_only_the_first_tells():
    later = dataclasses.replace(FIRST, held_s=tuple(held + 1.0 for held in FIRST.held_s))
    sample, totals = Sample.between(Counts.of(FIRST), Counts.of(later), 1.0), Totals()
    totals.add(sample, range(len(later.held_s)), ["n"] * len(later.held_s))
    first, other = (
        next(each.samples for each in totals.metrics(sample, 1, 0.0, alone) if each.name == "wait_seconds_total")
        for alone in (True, False)
    )
    assert len(first) == len(later.held_s)
    assert not other


def test_what_another_rank_still_has_is_opened_once_it_has_left(tmp_path, monkeypatch):
    """Elastic x all ranks x ports: rank 1 becomes rank 0 while the old rank 0 has not closed its port yet."""
    lines: list[str] = []
    monkeypatch.setattr("hvd_async.monitor.sinks.warn", lines.append)
    old = Endpoint(0)
    assert old.port is not None
    sinks = Sinks(Destinations(prometheus=tmp_path / "m.prom", prometheus_port=old.port, all_ranks=True))
    sinks.reopen(0, 0)
    sample = Sample.between(Counts.of(FIRST), Counts.of(FIRST), 1.0)
    sinks.write(sample, list, [0])
    assert (tmp_path / "m.prom").exists(), "the file does not wait for the port"
    assert (len(lines), sinks.port) == (1, None)
    old.close()
    sinks.write(sample, list, [0])
    assert sinks.port == old.port
    sinks.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every": 0}, "every=0 is not a number of steps"),
        ({"every": True}, "every=True is not a number of steps"),
        ({"window": 2.5}, "window=2.5 is not a number of steps"),
        ({"seconds": 0}, "seconds=0 is no time between samples"),
        ({"prometheus_port": 70000}, "prometheus_port=70000 is no port"),
    ],
)
def test_wrong_options_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Monitor(Optimizer(FIRST), **options)


def test_an_optimizer_that_is_not_wrapped_is_refused():
    with pytest.raises(ValueError, match="Monitor wants a wrapped optimizer, and object is none"):
        hvd_async.Monitor(object())


def test_a_monitor_does_not_keep_its_optimizer_alive(tmp_path: pathlib.Path):
    monitor = Monitor(Optimizer(FIRST), prometheus=tmp_path / "m.prom")
    gc.collect()
    monitor.step()
    assert monitor.sample() is None
    monitor.close()
    monitor.close()


# -- warnings, and other ranks ------------------------------------------------------------------------------------


def run(monitor: Monitor, optimizer: Optimizer, clock: Clock, windows: int, each: tuple[float, ...]) -> None:
    """Have so many windows of 10 steps pass, of a second each, in which ranks hold up the others by seconds."""
    for _ in range(windows):
        clock.now += 1.0
        now = optimizer.now
        assert isinstance(now, Stats)
        held = tuple(a + b for a, b in zip(now.held_s, each, strict=True))
        optimizer.now = dataclasses.replace(now, steps=now.steps + 10, held_s=held)
        monitor.sample()


def test_a_rank_that_is_slow_for_good_is_named_once_and_again_when_that_changes(said):
    clock, optimizer = Clock(), Optimizer(Stats(held_s=(0.0,) * 4))
    monitor = Monitor(optimizer, window=10, clock=clock)
    run(monitor, optimizer, clock, 2, (0.0, 0.0, 0.0, 0.93))
    assert not said
    run(monitor, optimizer, clock, 5, (0.0, 0.0, 0.0, 0.93))
    assert said == [
        "the other ranks wait 31% of their time, 31 ms a step, for rank 3 on host n1; "
        'pace="rounds" would let it give fewer gradients in place of holding up the others'
    ]
    run(monitor, optimizer, clock, 9, (0.0, 0.0, 0.0, 0.2))
    assert len(said) == 1, "between the two limits it is what it was"
    run(monitor, optimizer, clock, 9, (0.0, 0.0, 0.0, 0.1))
    assert said[1:] == ["the ranks do not wait for one of them more than for others any more"]
    run(monitor, optimizer, clock, 9, (0.0, 0.9, 0.0, 0.0))
    assert len(said) == 3
    assert "for rank 1 on host n0;" in said[2]


@pytest.mark.parametrize("options", [{"warn": False}, {"place": 1}])
def test_only_the_first_rank_speaks_and_not_if_it_must_not(said, options):
    clock, place = Clock(), options.pop("place", 0)
    optimizer = Optimizer(Stats(held_s=(0.0,) * 4), place=place)
    monitor = Monitor(optimizer, window=10, clock=clock, **options)
    run(monitor, optimizer, clock, 9, (0.0, 0.0, 0.0, 2.0))
    assert not said


def test_among_other_ranks_it_goes_on(said, tmp_path: pathlib.Path):
    """Elastic training: rank 1 of 4 becomes rank 0 of 3, and seconds held begin anew."""
    clock, optimizer = Clock(), Optimizer(Stats(held_s=(0.0,) * 4), place=1)
    monitor = Monitor(optimizer, window=10, clock=clock, prometheus=tmp_path / "m.prom")
    run(monitor, optimizer, clock, 4, (0.0, 0.0, 0.5, 2.0))
    optimizer.be(0, 3)
    optimizer.now = dataclasses.replace(optimizer.now, held_s=(0.0, 0.0, 3.0), resets=1)
    clock.now += 1.0
    monitor.sample()
    found = parsed((tmp_path / "m.prom").read_text())
    assert found["hvd_async_resets_total", (("rank", "0"),)] == 1
    waits = {dict(key[1])["culprit"]: value for key, value in found.items() if "wait_seconds_total" in key[0] and
             "culprit" in dict(key[1])}  # fmt: skip
    assert waits == {"2": 2.0 + 3.0, "3": 8.0}
    run(monitor, optimizer, clock, 3, (0.0, 0.0, 1.5))
    assert len(said) == 1
    assert "for rank 2 on host n1;" in said[0]


def test_gossip_is_judged_by_all_ranks_reports(said):
    clock = Clock()
    optimizer = Optimizer(GossipStats(waited_for=(0.0,) * 4), algorithm="dpsgd")
    monitor = Monitor(optimizer, clock=clock)
    for number in (1, 2, 3):
        clock.now += 10.0
        optimizer.now = GossipStats(steps=100 * number, wait_s=3.0 * number)
        own = monitor.report()
        assert own == WaitReport(0, pytest.approx(0.3), 0.1)
        monitor.compare(
            [WaitReport(rank, share, 0.1) for rank, share in ((2, 0.0), (0, own.share), (1, 0.3), (3, 0.3))]
        )
        monitor.sample()
        assert len(said) == (number >= 2)
    assert said[0].startswith("the other ranks wait 30% of their time, 30 ms a step, for rank 2 on host n1; Gossip")
    with pytest.raises(ValueError, match=r"compare\(\) lacks the report of ranks 1, 3"):
        monitor.compare([WaitReport(0, 0.0, 0.1), WaitReport(2, 0.0, 0.1)])
