"""A rank that stands still for longer than others wait for it is named, whoever gives up first: we, or Gloo."""

from __future__ import annotations

import pytest
from launch import start_ranks_without_launcher

pytestmark = pytest.mark.multiproc

HEARTBEATS_FIRST = {"HVD_ASYNC_DEAD_AFTER": "4"}
GLOO_FIRST = {"HVD_ASYNC_DEAD_AFTER": "9", "HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}


@pytest.mark.parametrize(("env", "seconds"), [(HEARTBEATS_FIRST, 8), (GLOO_FIRST, 14)], ids=["heartbeats", "gloo"])
def test_a_rank_that_stands_still_is_named(env: dict[str, str], seconds: int) -> None:
    job = start_ranks_without_launcher("standing.py", 3, args=("--seconds", str(seconds)), env=env).check_clean()
    assert "hvd_async: rank 1 on host localhost died: its connection" in job.outputs[0], str(job)
    for survivor in (0, 2):
        error = job.results[survivor]["error"]
        assert error["kind"] == "HorovodInternalError", error
        assert error["text"].startswith("rank 1 on host localhost died"), error
    assert "error" in job.results[1], "it has gone on, and ended"
