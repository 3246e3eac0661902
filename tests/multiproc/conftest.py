"""Each job runs once a session, however many tests ask for it (with pytest-xdist, those are in one worker)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from launch import PLANE, ForkServer, Job, RunJob, run_job


@pytest.fixture(scope="session")
def forked() -> Iterator[RunJob]:
    """``forked(framework, script, ranks, ...)``: ``ForkServer.run``, of the framework's server."""
    servers: dict[tuple[str, str], ForkServer] = {}
    with contextlib.ExitStack() as stack:

        def run(framework: str, script: str, ranks: int, *, transport: str = "", **options: Any) -> Job:
            transport = transport or ("torch" if framework == PLANE == "torch" else "gloo")
            if (framework, transport) not in servers:
                servers[framework, transport] = ForkServer(framework, transport)
                stack.callback(servers[framework, transport].close)
            return servers[framework, transport].run(script, ranks, **options)

        yield run


@pytest.fixture(scope="session")
def job(forked: RunJob) -> RunJob:
    """``run_job`` with a memory; ``server`` names a framework whose fork server starts the ranks instead."""
    done: dict[tuple[Any, ...], Job] = {}

    def run(
        script: str, ranks: int, transport: str = "gloo", args: tuple[str, ...] = (), server: str = "", **options: Any
    ) -> Job:
        key = (script, ranks, transport, args, server)
        if key not in done:
            if server:
                assert transport != "mpi", "who forks ranks connects them by Gloo"
                done[key] = forked(server, script, ranks, transport=transport, args=args, **options)
            else:
                done[key] = run_job(script, ranks, transport=transport, args=args, **options)
        return done[key]

    return run
