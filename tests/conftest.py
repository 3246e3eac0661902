"""What all tests share: Hypothesis settings, and a suite that fails on a thread it leaves behind."""

from __future__ import annotations

import ast
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import durations

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # (off by default on CPUs without AVX-512, which is slow)
LONG_RUN = bool(os.environ.get("HVD_ASYNC_TEST_LONG"))
"""scripts/check.sh --long: all that the ordinary run leaves out, and random examples that are new each time."""
settings.register_profile(
    "hvd_async", deadline=None, derandomize=not LONG_RUN, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hvd_async")


def examples(long: int) -> int:
    """How many examples a test looks at that has ``long`` of them in a long run: in an ordinary one a quarter."""
    return long if LONG_RUN else max(1, long // 4)


JOBS = "tests/multiproc/"
ALONE = ("doc_blocks", "elastic", "ends", "examples", "nemesis", "recipes", "runners")
APART = tuple(f"{JOBS}test_{topic}.py" for topic in ALONE)
"""Files whose jobs no test of another file looks at."""
NEXT_TO_JOBS = 5
"""Niceness of tests that run at the same time as horovodrun jobs: these have the cores when they need them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist, horovodrun jobs come first, in one worker the jobs that tests of several files share, in
    another the others: they take longest, and often wait (for a launcher, a timeout, the slowest rank)."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            lane = APART[0] if nodeid.startswith(APART) else JOBS
            return lane if nodeid.startswith(JOBS) else str(super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            # A worker that crashed leaves the units it has finished in the queue too. A worker that got one of these
            # would have nothing to run or to report, and the session would never end.
            for scope in [scope for scope, unit in self.workqueue.items() if all(unit.values())]:
                del self.workqueue[scope]
            for lane in (APART[0], JOBS):
                if lane in self.workqueue:
                    self.workqueue.move_to_end(lane, last=False)
            if self.workqueue:
                super()._assign_work_unit(node)
            else:
                node.shutdown()

    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names of tests that differ between two processes: pytest-xdist's would not have the same tests."""
    by_address = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if by_address:
        raise pytest.UsageError(f"give these parameters an id, which now holds an address: {by_address}")


BEGUN = pytest.StashKey[float]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """In a worker of pytest-xdist: make way for jobs."""
    item.stash[BEGUN] = durations.cpu_seconds()
    if "PYTEST_XDIST_WORKER" in os.environ and not item.nodeid.startswith(JOBS):
        os.setpriority(os.PRIO_PROCESS, 0, max(NEXT_TO_JOBS, os.getpriority(os.PRIO_PROCESS, 0)))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Note what the test took, for ``tests/durations.py``."""
    if BEGUN in item.stash:  # (a test that is skipped is not set up)
        item.user_properties.append((durations.CPU, round(durations.cpu_seconds() - item.stash[BEGUN], 3)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files whose tests took more than their budget."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                took[report.nodeid.partition("::")[0]] += report.duration
    for line in durations.over(took, durations.read()):
        terminalreporter.write_line(f"slow: {line}")


_parse, _parsing = ast.parse, threading.Lock()


def _parse_alone(*args: Any, **options: Any) -> ast.AST:
    with _parsing:
        return _parse(*args, **options)


# Ranks are threads here, and TensorFlow parses the functions that they trace. CPython keeps count of the recursion of
# all threads' parses in one place (gh-106905), so two at once may end in a SystemError.
ast.parse = _parse_alone  # type: ignore[assignment]

OURS = ("hvd_async", "rank-")
"""How the names of the library's threads, and of the simulated ranks, begin."""


def our_threads() -> set[threading.Thread]:
    """Those of this library that are alive."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(OURS)}


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail if a test leaves one of the library's threads behind (they get a few seconds to end)."""
    before = our_threads()
    yield
    deadline = time.monotonic() + 10.0
    for thread in our_threads() - before:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = sorted(thread.name for thread in our_threads() - before)
    assert not left, f"threads left behind: {', '.join(left)}"
