"""A monitor of real ranks, one of which is slow for good."""

from __future__ import annotations

import re

import pytest
from launch import Job, RunJob
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.multiproc


def waits(text: str) -> dict[str, float]:
    """Seconds waited by culprit."""
    families = text_string_to_metric_families(text)
    samples = [sample for one in families for sample in one.samples]
    return {s.labels["culprit"]: s.value for s in samples if s.name == "hvd_async_wait_seconds_total"}


def check_warning(job: Job, pattern: str) -> None:
    """Rank 0 says once who is slow and what would help, and no other rank does."""
    found = re.findall(r"hvd_async: the other ranks wait (\d+)% of their time, (.*)", job.output)
    ((share, text),) = found
    assert int(share) > 10
    assert re.search(pattern, text)
    assert not any("the other ranks wait" in output for output in job.outputs[1:])


def test_the_files_the_endpoint_and_a_warning_name_the_slow_rank(forked: RunJob) -> None:
    job = forked("torch", "monitored.py", 3).check()
    case, text = job.case("eager")[0], job.kept["m.prom"]
    found = waits(text)
    assert max(found, key=lambda culprit: found[culprit]) == "2"
    assert found["2"] == pytest.approx(case["held"][2])
    assert found["2"] > 1.0, "two ranks waited 70 times, for 20 ms"
    assert waits(case["served"]) == pytest.approx(found)
    assert 'host="localhost"' in text
    for rank in (1, 2):
        assert f'hvd_async_steps_total{{rank="{rank}"}} 70.0' in job.kept[f"m.rank{rank}.prom"]
    own = [name.split("/")[1] for name in case["events"]]
    assert {name for name in own if "tfevents" not in name} == {"rank1", "rank2"}
    assert any("tfevents" in name for name in own)
    gives = 'quorum="solo", pace="rounds" would let it contribute fewer gradients'
    check_warning(job, f"for rank 2 on host localhost; {gives}")


def test_gossiping_ranks_compare_their_waits_in_fit(forked: RunJob) -> None:
    job = forked("tensorflow", "tf_monitored.py", 2).check()
    assert [case["left"] for case in job.case("fit")] == [0, 0], "fit() has closed its monitors"
    check_warning(job, r'for rank 1 on host \S+ GossipOptimizer\(algorithm="adpsgd"\) waits only')
