"""Merging rounds into Horovod's timeline, tried on one that Horovod 0.28.1 wrote (2 ranks, Gloo, 12 collectives)."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager import timeline
from hvd_async.algorithms.eager.config import RoundTrigger
from hvd_async.algorithms.eager.timeline import PROCESS, Record, Timeline, merge_into, trace_events

SAMPLE = Path(__file__).parent / "horovod_timeline.json"
# From the program that was recorded: time.time() - time.monotonic(), and when rank 0 submitted each collective and had
# it back, by time.monotonic().
EPOCH = 1795219904.647969
SUBMITTED = [
    ((1, 0), 12489.349565804, 12489.400508611),
    ((1, 1), 12489.400627601, 12489.412043369),
    ((2, 0), 12489.412131549, 12489.428041191),
    ((2, 1), 12489.428106121, 12489.436452407),
    ((3, 0), 12489.436508967, 12489.448242845),
    ((3, 1), 12489.448313125, 12489.456470001),
    ((4, 0), 12489.456537951, 12489.457685162),
    ((4, 1), 12489.457719972, 12489.458698392),
    ((5, 0), 12489.458775252, 12489.459772103),
    ((5, 1), 12489.459829203, 12489.460750964),
    ((6, 0), 12489.460766334, 12489.461832185),
    ((6, 1), 12489.461879175, 12489.468089479),
]


def record(bucket=0, round=1, submitted=10.0, landed=11.0, first=None, optimizer=0, staleness=(0,)):
    first = submitted - 0.2 if first is None else first
    return Record(optimizer, bucket, round, RoundTrigger("solo", 1, 2, first, submitted - 0.1, 0.25), submitted, landed,
                  staleness)  # fmt: skip


def recorded():
    return [record(bucket, number, start, end, first=start) for (number, bucket), start, end in SUBMITTED]


def in_us(event):
    return event["ts"], event["ts"] + event["dur"]


@pytest.fixture
def file(tmp_path):
    return Path(shutil.copy(SAMPLE, tmp_path / "x.json"))


def test_horovods_own_events_are_untouched(file):
    before = SAMPLE.read_bytes()
    merge_into(file, recorded(), {}, EPOCH)
    after = file.read_bytes()
    assert after.startswith(before.rstrip().removesuffix(b"]"))
    events = json.loads(after)
    theirs = json.loads(before)
    assert events[: len(theirs)] == theirs
    assert {event["pid"] for event in events[len(theirs) :]} == {PROCESS}
    assert PROCESS not in {event["pid"] for event in theirs}


def test_the_clocks_agree(file):
    """Each collective of this library spans what Horovod says of the same tensor: 20 microseconds of air at its end."""
    merge_into(file, recorded(), {}, EPOCH)
    events = json.loads(file.read_text())
    names = {e["pid"]: e["args"].get("name") for e in events if e["name" if "name" in e else "ph"] == "process_name"}
    ends = {}  # Horovod's: tensor -> when its collectives were over
    for event in events:
        if event["ph"] == "E" and "args" in event:
            ends.setdefault(names[event["pid"]], []).append(event["ts"])
    rows = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    ours = [(rows[e["tid"]], *in_us(e)) for e in events if e.get("name") == "collective"]
    assert len(ours) == 12
    for bucket in (0, 1):
        mine = [(start, end) for row, start, end in ours if row == f"bucket {bucket}"]
        for number, (start, end) in enumerate(mine, 1):
            theirs = ends[f"allreduce.hvd_async.eager.0.{bucket}.{number % 4}"][(number - 1) // 4]
            assert start < theirs < end
        assert end - theirs < 2000


def test_a_rounds_slices_and_why_it_fired():
    events = trace_events([record(staleness=(0, 2))], {(0, 1): 12.5}, began=9.0)
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {name: in_us(event) for name, event in slices.items()} == {
        "round 1": (800_000, 3_500_000),
        "gathering ranks": (800_000, 900_000),
        "collective": (1_000_000, 2_000_000),
        "waiting to be applied": (2_000_000, 3_500_000),
    }
    assert slices["round 1"]["args"] == {
        "reason": "solo", "by": 1, "arrived": 2, "held_s": 0.25, "staleness_rank0": [0, 2]
    }  # fmt: skip
    labels = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert labels == ["hvd_async rounds", "bucket 0"]


def test_rows_are_named_by_optimizer_where_there_are_several():
    events = trace_events([record(), record(optimizer=1, bucket=2)], {}, 0.0)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        "optimizer 0, bucket 0",
        "optimizer 1, bucket 2",
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 1)), max_size=25))
def test_slices_of_a_row_nest(spans):
    """Chrome draws slices that overlap without nesting on top of each other."""
    records = [
        record(bucket, number, first=start, submitted=start + 0.1, landed=start + 0.1 + length)
        for number, (start, length, bucket) in enumerate(spans, 1)
    ]
    rows = {}
    for event in trace_events(records, {}, 0.0):
        if event["name"].startswith("round "):
            rows.setdefault(event["tid"], []).append(in_us(event))
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(row))
    assert sum(len(row) for row in rows.values()) == len(spans)


def test_rounds_of_a_horovod_before_this_file_are_left_out(file):
    began = 1795232393.992140 - EPOCH
    merge_into(file, [record(round=1, submitted=began - 5), record(round=2, submitted=began + 5)], {}, EPOCH)
    names = [event.get("name") for event in json.loads(file.read_text())]
    assert "round 2" in names
    assert "round 1" not in names


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda text: "", "does not begin"),
        (lambda text: text[:-1], "is not complete"),
        (lambda text: text[: len(text) // 2], "is not complete"),
        (lambda text: '[\n{"traceEvents": 1}]', "does not begin"),
    ],
)
def test_what_is_no_complete_timeline_is_left_alone(file, capfd, monkeypatch, spoil, problem):
    file.write_text(spoil(file.read_text()))
    before = file.read_bytes()
    monkeypatch.setenv("HOROVOD_TIMELINE", str(file))
    kept = Timeline(file, EPOCH)
    kept.round(*recorded()[0])
    kept.merge()
    assert file.read_bytes() == before
    assert problem in capfd.readouterr().err


def test_a_file_that_is_not_there_is_said(tmp_path, capfd):
    kept = Timeline(tmp_path / "none.json", EPOCH)
    kept.merge()
    assert capfd.readouterr().err == "", "nothing was recorded"
    kept.round(*recorded()[0])
    kept.merge()
    assert "rounds are missing from the timeline" in capfd.readouterr().err


def test_merging_twice_adds_nothing(file, capfd):
    kept = Timeline(file, EPOCH)
    for one in recorded():
        kept.round(*one)
        kept.applied(0, one.round, one.landed + 0.001)
    kept.merge()
    once = file.read_bytes()
    kept.merge()
    assert file.read_bytes() == once
    assert capfd.readouterr().err == "", "nothing is left to merge"
    waits = [event["dur"] for event in json.loads(once) if event.get("name") == "waiting to be applied"]
    assert waits[1::2] == pytest.approx([1000] * 6, abs=1), "bucket 1 is the round's last"
    assert min(waits) >= 999


def test_a_long_jobs_memory_is_bounded(file, monkeypatch, capfd):
    monkeypatch.setattr(timeline, "MOST", 5)
    kept = Timeline(file, EPOCH)
    for one in recorded():
        kept.round(*one)
    kept.merge()
    assert "the first 5 buckets of rounds; 7 later ones are left out" in capfd.readouterr().err
    assert [e["name"] for e in json.loads(file.read_text()) if "name" in e].count("collective") == 5


@pytest.mark.parametrize(
    ("rank", "name", "there"), [(0, "x.json", True), (1, "x.json", False), (0, "", False), (0, "DYNAMIC", False)]
)
def test_only_rank_0_records_and_only_when_asked(monkeypatch, rank, name, there):
    monkeypatch.setattr(timeline, "_recorder", None)
    monkeypatch.setenv("HOROVOD_TIMELINE", name)
    found = timeline.recorder(rank)
    assert (found is not None) == there
    assert timeline.recorder(rank) is found


@pytest.mark.parametrize("first", ["import", "init"])
def test_at_exit_the_merge_comes_after_horovods_shutdown(tmp_path, first):
    """Whether Horovod was initialized before our binding was imported or after."""
    program = (
        "import atexit, os, sys\n"
        "from hvd_async.algorithms.eager import timeline\n"
        "from hvd_async.algorithms.eager.config import RoundTrigger\n"
        f"path, sample = {str(tmp_path / 'x.json')!r}, open({str(SAMPLE)!r}).read()\n"
        "state = {'up': True}\n"
        "def shutdown():\n"
        "    if state['up']:\n"
        "        state['up'] = False\n"
        "        open(path, 'w').write(sample)\n"
        "def init(): atexit.register(shutdown)\n"
        "def imported(): timeline.watch_exit(shutdown)\n"
        f"(imported(), init()) if {first!r} == 'import' else (init(), imported())\n"
        f"at = {SUBMITTED[0][1]}\n"
        "timeline.recorder(0).round(0, 0, 1, RoundTrigger('solo', 0, 1, at, at, 0.0), at, at)\n"
        f"timeline._recorder._epoch = {EPOCH}\n"
    )
    environment = {"HOROVOD_TIMELINE": str(tmp_path / "x.json")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "round 1" in {event.get("name") for event in json.loads((tmp_path / "x.json").read_text())}
