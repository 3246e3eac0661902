"""Each job runs once a session, however many tests ask for it (with pytest-xdist, one worker runs all of them)."""

from __future__ import annotations

from typing import Any

import pytest
from launch import Job, RunJob, run_job


@pytest.fixture(scope="session")
def job() -> RunJob:
    """``run_job`` with a memory."""
    done: dict[tuple[Any, ...], Job] = {}

    def run(script: str, ranks: int, transport: str = "gloo", args: tuple[str, ...] = (), **options: Any) -> Job:
        key = (script, ranks, transport, args)
        if key not in done:
            done[key] = run_job(script, ranks, transport=transport, args=args, **options)
        return done[key]

    return run
