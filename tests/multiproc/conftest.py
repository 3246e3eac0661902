"""Each job runs once a session, however many tests ask for it; with pytest-xdist, one worker runs all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import Job, RunJob, run_job


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs need the machine for themselves as far as can be, and are remembered by the worker that ran them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("multiproc"))


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
