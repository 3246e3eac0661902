"""Virtual hosts: ranks in network namespaces, and nothing of them left afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONG_RUN

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "virtual_cluster.py"


pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not LONG_RUN, reason="virtual clusters are tried in a long run: HVD_ASYNC_TEST_LONG=1"),
    pytest.mark.usefixtures("namespaces"),
]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def left() -> list[str]:
    """Namespaces, links and files of clusters."""
    names = output("ip", "netns", "list") + output("ip", "-brief", "link", "show")
    return sorted({*re.findall(r"\bhva\d+-\w+", names), *(path.name for path in Path("/etc/netns").glob("hva*"))})


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    output(sys.executable, str(SCRIPT), "--clean")  # of runs that were killed, also before a restart: /etc/netns stays
    before = left()
    yield
    output(sys.executable, str(SCRIPT), "--clean")
    assert left() == before


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_ranks_are_on_hosts_of_their_own_with_limited_links():
    say = 'echo "$HOROVOD_RANK $HOROVOD_LOCAL_RANK $HOROVOD_CROSS_RANK $(hostname) $(getent hosts $(hostname))"'
    say += "; tc class show dev $HOROVOD_GLOO_IFACE"
    before = left()
    done = run("--hosts", "2", "--per-host", "2", "--mbit", "20", "--", "sh", "-c", say)
    assert done.returncode == 0, done.stderr
    ranks = sorted(line.split() for line in done.stdout.splitlines() if line[0].isdigit())
    assert [rank[:3] for rank in ranks] == [[str(r), str(r % 2), str(r // 2)] for r in range(4)]
    assert len({rank[3] for rank in ranks}) == len({rank[4] for rank in ranks}) == 2
    assert all(rank[3] == rank[5] for rank in ranks)
    assert done.stdout.count("htb 1:1 root rate 20Mbit ceil 20Mbit") == 4
    assert left() == before


def test_when_a_rank_fails_the_others_are_ended():
    done = run("--hosts", "3", "--", "sh", "-c", "test $HOROVOD_RANK != 1 || exit 7; sleep 600")
    assert done.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(number):
    ranks = ["sh", "-c", "echo ready; exec sleep 600"]
    process = psutil.Popen([sys.executable, str(SCRIPT), "--hosts", "2", "--", *ranks], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    assert len(left()) >= 3
    children = process.children(recursive=True)
    process.send_signal(number)
    assert process.wait(30) != 0
    if number == signal.SIGKILL:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    else:
        assert not [name for name in left() if str(process.pid) in name]
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_what_a_restart_leaves_is_removed_unless_its_run_is_alive():
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = (Path("/etc/netns") / f"hva{pid}-0" for pid in (ended.pid, os.getppid()))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    try:
        output(sys.executable, str(SCRIPT), "--clean")
        assert (dead.exists(), alive.exists()) == (False, True)
    finally:
        alive.rmdir()
