"""The plan of ``advice``: a job of the framework is recorded, then all arms are measured with times not seen before."""

from __future__ import annotations

import json

import pytest

from scripts.benchmarks.cases import advice
from scripts.benchmarks.support import launch
from tests.unit.bench_jobs import options

ARMS = ["all", "solo", "lsgd"]


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Makes a plan of a command line: (job, blocks, what all blocks have); no job is started."""

    def planned(*line, mbit=None):
        found = []

        def measure(args, job, blocks, say, tell, *, plan, seconds, progress, **how):
            found.extend([job, json.loads(json.dumps(blocks)), plan | how])
            return blocks

        monkeypatch.setattr(launch, "measure", measure)
        args = options(advice, "--steps", "30", *line, ranks=4, repetitions=2)
        left = advice.blocks(args, ARMS, "straggler", mbit, tmp_path, launch.Progress(0, print), print)
        assert left == found[1][1:], "what was recorded is not measured"
        return found

    return planned


@pytest.mark.parametrize(("line", "job"), [((), "timed"), (("--framework", "keras"), "timed_keras")])
def test_the_job_is_the_frameworks_and_is_recorded_before_it_is_measured(plan, tmp_path, line, job):
    started, (recorded, *measured), common = plan(*line)
    assert started == job
    assert common == {"model": "small"}
    assert (recorded["arm"], recorded["trace"]) == ("all", str(tmp_path))
    assert [block["arm"] for block in measured] == ["all", "solo", "lsgd", "solo", "lsgd", "all"]
    for block in measured:
        assert "trace" not in block
        assert block["times"] == measured[0]["times"] != recorded["times"]
        assert (len(block["times"]), block["barrier"]) == (30, False)


def test_frameworks_have_the_same_times_and_links(plan):
    ours, keras = plan(mbit=50.0), plan("--framework", "keras", mbit=50.0)
    assert ours[1:] == keras[1:]
    assert keras[2] == {"model": "network", "megabytes": 2.0, "mbit": 50.0}
