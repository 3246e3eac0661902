"""Each job runs once a session, however many tests ask for it (with pytest-xdist, those are in one worker)."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from launch import FRAMEWORKS, PLANE, SERVERS, ForkServer, Job, RunJob, run_job
from settings import Setting


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[..., ForkServer]]:
    """``server(kind, transport)``: the fork server of a kind, which is started once."""
    servers: dict[tuple[str, str], ForkServer] = {}
    with contextlib.ExitStack() as stack:

        def start(kind: str, transport: str = "") -> ForkServer:
            transport = transport or ("torch" if kind == PLANE == "torch" else "gloo")
            if (kind, transport) not in servers:
                if kind in FRAMEWORKS:
                    made = ForkServer(FRAMEWORKS[kind], transport)
                else:
                    framework, modules = SERVERS[kind]
                    made = ForkServer(modules, transport, start(framework, "gloo"))
                servers[kind, transport] = made
                stack.callback(made.close)
            return servers[kind, transport]

        yield start


@pytest.fixture(scope="session")
def forked(server: Callable[..., ForkServer]) -> RunJob:
    """``forked(kind, script, ranks, ...)``: ``ForkServer.run``, of that kind of server."""

    def run(kind: str, script: str, ranks: int, *, transport: str = "", **options: Any) -> Job:
        return server(kind, transport).run(script, ranks, **options)

    return run


@pytest.fixture(scope="session")
def launched(server: Callable[..., ForkServer]) -> RunJob:
    """``launched(kind, script, ranks, ...)``: ``run_job``, whose ranks come from that kind of server."""

    def run(kind: str, script: str, ranks: int, *, transport: str = "gloo", **options: Any) -> Job:
        own = server(kind, transport) if transport != "mpi" else None
        return run_job(script, ranks, transport=transport, server=own, **options)

    return run


@pytest.fixture(scope="session")
def job(forked: RunJob, launched: RunJob) -> Callable[[Setting], Job]:
    """``job(setting)``: the job that all tests of a setting look at."""
    return functools.cache(lambda setting: setting.run(launched if setting.launched else forked))


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip what needs network namespaces where there are none."""
    name = f"hva-probe-{os.getpid()}"
    tools = shutil.which("ip") and shutil.which("tc")
    if os.geteuid() or not tools or subprocess.run(["ip", "netns", "add", name]).returncode:
        pytest.skip("network namespaces need root, ip and tc")
    subprocess.run(["ip", "netns", "delete", name], check=True)
