"""Results that a run of a case keeps, for the next one to go on with what is left."""

from __future__ import annotations

import argparse

import pytest

from scripts.benchmarks.support import launch
from scripts.benchmarks.support.kept import Kept


def block(arm, seed=0, seconds=0.1):
    return {"arm": arm, "fold": 0, "seed": seed, "times": [[seconds] * 2] * 3}


def found(asked):
    told = {key: value for key, value in asked.items() if key != "times"}
    return {**told, "by_rank": [{"accuracy": 0.9 + asked["seed"] / 100}]}


@pytest.fixture
def asked(monkeypatch):
    """Blocks that jobs were asked for; a job is ended before a block whose arm is named so."""
    blocks, ended = [], []

    def run(job, ranks, plan, *, limit, on_block, **how):
        for each in plan["blocks"]:
            if each["arm"] in ended:
                raise launch.JobError("ended by force")
            blocks.append(each)
            on_block(found(each))

    monkeypatch.setattr(launch, "run", run)
    return blocks, ended


def measure(path, blocks, **how):
    args = argparse.Namespace(resume=path, ranks=2, limit=None)
    return launch.measure(args, "accuracy", blocks, lambda text: None, str, seconds=1.0, **how)


def test_a_run_goes_on_with_what_is_left(asked, tmp_path):
    blocks, ended = asked
    every, path = [block("horovod"), block("sgp"), block("dpsgd", seed=1)], tmp_path / "kept.jsonl"
    ended.append("dpsgd")
    with pytest.raises(launch.JobError):
        measure(path, every)
    assert blocks == every[:2]
    ended.clear()
    assert measure(path, every) == list(map(found, every))
    assert blocks == every
    more = [block("osgp"), *every[::-1]]
    assert measure(path, more) == list(map(found, more))
    assert blocks == [*every, more[0]]


def test_what_was_trained_otherwise_does_not_count(asked, tmp_path):
    blocks, _ = asked
    path = tmp_path / "kept.jsonl"
    measure(path, [block("sgp")])
    measure(path, [block("sgp", seconds=0.2)])
    measure(path, [block("sgp")], env={"HOROVOD_CYCLE_TIME": "5"})
    assert blocks == [block("sgp"), block("sgp", seconds=0.2), block("sgp")]


def test_without_a_file_all_are_trained_again(asked):
    blocks, _ = asked
    assert measure(None, [block("sgp")]) == measure(None, [block("sgp")]) == [found(block("sgp"))]
    assert len(blocks) == 2


def test_a_line_that_was_not_written_to_its_end_does_not_count(tmp_path):
    path = tmp_path / "kept.jsonl"
    Kept(path).add(block("sgp"), found(block("sgp")))
    with path.open("a") as lines:
        lines.write('["half')
    kept = Kept(path)
    assert kept.of(block("sgp")) == found(block("sgp"))
    kept.add(block("osgp"), found(block("osgp")))
    assert Kept(path).of(block("osgp")) == found(block("osgp"))
