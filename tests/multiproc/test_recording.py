"""A real job is recorded, by ``hvd_async record`` and by hand, and advised on."""

from __future__ import annotations

import pytest
from launch import JOBS, run_job

from hvd_async.advisor.advice import advise
from hvd_async.traces.format import Trace, read_trace

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """The traces of one job of 2 ranks, the second of which is slow."""
    folder = tmp_path_factory.mktemp("traces")
    script, horovod = str(JOBS / "recorded_training.py"), str(folder / "horovod")
    args = (horovod, script, str(folder), "--steps", "30")
    output = run_job("recorded.py", 2, args=args).check().output
    assert "a second optimizer was made, by EagerOptimizer" in output
    return {name: read_trace(folder / name, least=20) for name in ("horovod", "eager")}


def test_an_unchanged_script_is_recorded_whole(traces: dict[str, Trace]) -> None:
    trace = traces["horovod"]
    assert (trace.ranks, trace.steps) == (2, 27)
    assert [header.algorithm for header in trace.headers] == ["horovod", "horovod"]
    assert trace.headers[0].parameter_bytes == 4 * (8 * 4 + 4)
    assert trace.headers[0].synchronized
    assert trace.headers[0].run is not None, "the launcher tells runs apart"


def test_ours_is_recorded_by_hand(traces: dict[str, Trace]) -> None:
    trace = traces["eager"]
    assert (trace.ranks, trace.steps) == (2, 27)
    assert trace.headers[1].algorithm == "eager"
    assert trace.headers[1].options["quorum"] == "all"


@pytest.mark.parametrize("name", ["horovod", "eager"])
def test_the_slow_rank_works_and_the_other_one_waits(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name]
    work, waits = trace.work.mean(axis=0), trace.waits.mean(axis=0)
    assert work[1] > work[0]
    assert waits[0] > waits[1]
    begins = trace.begin[1:] - trace.done[:-1]
    assert abs(begins).max() < 1e-5
    assert (trace.released <= trace.done).all()


@pytest.mark.parametrize("name", ["horovod", "eager"])
def test_the_advisor_blames_the_slow_rank(traces: dict[str, Trace], name: str) -> None:
    found = advise(traces[name], modes="solo,pace rounds,adpsgd", resamples=2, steps=50)
    assert found.culprits.slow == 1
    assert found.culprits.waited[0] > found.culprits.waited[1]
    assert found.own is not None
    gains = {each.mode.name: each.gain.mean for each in found.predictions}
    assert gains["adpsgd"] > gains["horovod"]
