"""Merging rounds into Horovod's timeline, tried on one that Horovod 0.28.1 wrote (2 ranks, Gloo, 12 collectives).

That the clocks agree with Horovod's own events is seen in a real job: ``multiproc/test_timeline``.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager import timeline
from hvd_async.algorithms.eager.config import RoundTrigger
from hvd_async.algorithms.eager.timeline import PROCESS, Record, Timeline, trace_events

SAMPLE = Path(__file__).parent / "horovod_timeline.json"
EPOCH = 1795219904.647969
"""time.time() - time.monotonic() where it was written."""
BEGAN = 1795232393.992140 - EPOCH
"""When Horovod began to write it."""


def record(bucket=0, round=1, submitted=BEGAN + 5, landed=None, first=None, optimizer=0, staleness=(0,)):
    first, landed = submitted - 0.2 if first is None else first, submitted + 1.0 if landed is None else landed
    return Record(optimizer, bucket, round, RoundTrigger("solo", 1, 2, first, submitted - 0.1, 0.25), submitted, landed,
                  staleness)  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return Path(shutil.copy(SAMPLE, tmp_path / "x.json"))


@pytest.fixture
def kept(file):
    """A timeline with two buckets of a round, which is applied a millisecond after the second one has landed."""
    kept = Timeline(file, EPOCH)
    for bucket in (0, 1):
        kept.round(*record(bucket, landed=BEGAN + 6 + bucket, staleness=(0, 2)))
    kept.applied(0, 1, BEGAN + 7.001)
    return kept


def test_rounds_are_added_on_horovods_clock_once(file, kept, capfd):
    """Rounds of a Horovod before this file are left out."""
    kept.round(*record(round=2, submitted=BEGAN - 5))
    kept.merge()
    before, after = SAMPLE.read_bytes(), file.read_bytes()
    assert after.startswith(before.rstrip().removesuffix(b"]")), "Horovod's own events are untouched"
    theirs, events = json.loads(before), json.loads(after)
    ours = events[len(theirs) :]
    assert {event["pid"] for event in ours} == {PROCESS}
    assert PROCESS not in {event["pid"] for event in theirs}
    why = {"reason": "solo", "by": 1, "arrived": 2, "held_s": 0.25, "staleness_rank0": [0, 2]}
    names = [{"name": name} for name in ("hvd_async rounds", "bucket 0", "bucket 1")]
    assert [event["args"] for event in ours if "args" in event] == [*names, why, why]
    assert [(event["name"], event["ts"], event["dur"]) for event in ours if event["ph"] == "X"] == [
        ("round 1", 4_800_000, 2_201_000),
        ("gathering ranks", 4_800_000, 100_000),
        ("collective", 5_000_000, 1_000_000),
        ("waiting to be applied", 6_000_000, 1_001_000),
        ("round 1", 4_800_000, 2_201_000),
        ("gathering ranks", 4_800_000, 100_000),
        ("collective", 5_000_000, 2_000_000),
        ("waiting to be applied", 7_000_000, 1_000),
    ]
    kept.merge()
    assert file.read_bytes() == after
    assert capfd.readouterr().err == "", "nothing is left to merge"


def test_rows_are_named_by_optimizer_where_there_are_several():
    events = trace_events([record(), record(optimizer=1, bucket=2)], {}, 0.0)
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert rows == ["optimizer 0, bucket 0", "optimizer 1, bucket 2"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 1)), max_size=25))
def test_slices_of_a_row_nest(rounds):
    """Chrome draws slices that overlap without nesting on top of each other."""
    records = [
        record(bucket, number, first=start, submitted=start + 0.1, landed=start + 0.1 + length)
        for number, (start, length, bucket) in enumerate(rounds, 1)
    ]
    rows = {}
    for event in trace_events(records, {}, 0.0):
        if event["name"].startswith("round "):
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(row))
    assert sum(len(row) for row in rows.values()) == len(rounds)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda text: "", "does not begin"),
        (lambda text: text[:-1], "is not complete"),
        (lambda text: text[: len(text) // 2], "is not complete"),
        (lambda text: '[\n{"traceEvents": 1}]', "does not begin"),
    ],
)
def test_what_is_no_complete_timeline_is_left_alone(file, kept, capfd, spoil, problem):
    file.write_text(spoil(file.read_text()))
    before = file.read_bytes()
    Timeline(file, EPOCH).merge()
    assert capfd.readouterr().err == "", "nothing was recorded"
    kept.merge()
    assert file.read_bytes() == before
    assert problem in capfd.readouterr().err


def test_a_file_that_is_not_there_is_said(file, kept, capfd):
    file.unlink()
    kept.merge()
    assert "rounds are missing from the timeline" in capfd.readouterr().err


def test_a_long_jobs_memory_is_bounded(file, kept, monkeypatch, capfd):
    monkeypatch.setattr(timeline, "MOST", 2)
    kept.round(*record(2))
    kept.merge()
    assert "the first 2 buckets of rounds; 1 later ones are left out" in capfd.readouterr().err
    assert [e["name"] for e in json.loads(file.read_text()) if "name" in e].count("collective") == 2


@pytest.mark.parametrize(
    ("rank", "name", "there"), [(0, "x.json", True), (1, "x.json", False), (0, "", False), (0, "DYNAMIC", False)]
)
def test_only_rank_0_records_and_only_when_asked(monkeypatch, rank, name, there):
    monkeypatch.setattr(timeline, "_recorder", None)
    monkeypatch.setenv("HOROVOD_TIMELINE", name)
    found = timeline.recorder(rank)
    assert (found is not None) == there
    assert timeline.recorder(rank) is found


@pytest.mark.parametrize("order", [("import", "init"), ("init", "import")])
def test_at_exit_the_merge_comes_after_horovods_shutdown(tmp_path, monkeypatch, order):
    """Whether Horovod was initialized before our binding was imported or after."""
    hooks, path = [], tmp_path / "x.json"
    monkeypatch.setattr("atexit.register", hooks.append)
    monkeypatch.setattr(timeline, "_recorder", Timeline(path, EPOCH))

    def shutdown():
        if not path.exists():
            shutil.copy(SAMPLE, path)

    for step in order:
        timeline.watch_exit(shutdown) if step == "import" else hooks.append(shutdown)
    timeline._recorder.round(*record())
    for hook in reversed(hooks):
        hook()
    assert "round 1" in {event.get("name") for event in json.loads(path.read_text())}
