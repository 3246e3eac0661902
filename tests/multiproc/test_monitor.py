"""A monitor of real ranks, one of which is slow for good."""

from __future__ import annotations

import re

import pytest
from launch import Job, RunJob
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def monitored(forked: RunJob) -> Job:
    """The job: 3 ranks, of which rank 2 sleeps in each step."""
    return forked("torch", "monitored.py", 3).check()


def waits(text: str) -> dict[str, float]:
    """Seconds waited by culprit."""
    families = text_string_to_metric_families(text)
    samples = [sample for one in families for sample in one.samples]
    return {s.labels["culprit"]: s.value for s in samples if s.name == "hvd_async_wait_seconds_total"}


def test_the_file_and_the_endpoint_name_the_slow_rank(monitored: Job) -> None:
    case = monitored.case("eager")[0]
    found = waits(monitored.kept["m.prom"])
    assert max(found, key=lambda culprit: found[culprit]) == "2"
    assert found["2"] == pytest.approx(case["held"][2])
    assert found["2"] > 1.0, "two ranks waited 70 times, for 20 ms"
    assert waits(case["served"]) == pytest.approx(found)
    assert 'host="localhost"' in monitored.kept["m.prom"]


def test_every_rank_has_files_of_its_own(monitored: Job) -> None:
    for rank in (1, 2):
        text = monitored.kept[f"m.rank{rank}.prom"]
        assert f'hvd_async_steps_total{{rank="{rank}"}} 70.0' in text
    folders = {name.split("/")[1] for name in monitored.case("eager")[0]["events"]}
    assert {name for name in folders if "tfevents" not in name} == {"rank1", "rank2"}
    assert any("tfevents" in name for name in folders)


def test_rank_0_says_once_who_is_slow_and_what_would_help(monitored: Job) -> None:
    said = re.findall(r"hvd_async: the other ranks wait (\d+)% of their time, .*", monitored.outputs[0])
    lines = [line for line in monitored.outputs[0].splitlines() if "the other ranks wait" in line]
    assert len(said) == 2, lines
    assert all("for rank 2 on host localhost; " in line for line in lines)
    assert not any("the other ranks wait" in output for output in monitored.outputs[1:])
    assert 'quorum="solo", pace="rounds" would let it contribute fewer gradients' in lines[0]
    assert 'GossipOptimizer(algorithm="adpsgd") waits only after max_local_steps' in lines[1]
    assert all(int(share) > 10 for share in said)


def test_the_keras_callback_does_the_same(forked: RunJob) -> None:
    done = forked("tensorflow", "tf_monitored.py", 2).check()
    assert [case["left"] for case in done.case("fits")] == [0, 0], "fit() has closed its monitors"
    found = waits(done.kept["m.prom"])
    assert max(found, key=lambda culprit: found[culprit]) == "1"
    lines = [line for line in done.outputs[0].splitlines() if "the other ranks wait" in line]
    assert ["quorum=" in line for line in lines] == [True, False], done.output
    assert all("for rank 1 on host " in line for line in lines)
    assert "the other ranks wait" not in done.outputs[1]
