"""A process's end is distinguished from a failure, in real processes: each script ends in another way."""

from __future__ import annotations

import pytest

from tests.unit.forks import End, run_scripts

BEFORE = """
import atexit, pickle
from sys import exit as imported
from hvd_async.runtime.exit_status import exit_status
from hvd_async.runtime.lifecycle import Lifecycle
"""
THEN = """
class Ended(Lifecycle):
    def shutdown(self, leaving=False): print("drained")
    def abandon(self, error): print("abandoned:", error)
life = Ended(lambda: None, (), lambda: None)
atexit.register(life._at_exit)
exit_status.watch()
exit_status.watch()
def fail(): raise ValueError("boom")
def leave(code): sys.exit(code)
"""
CAUGHT = """
try:
    {how}
except BaseException as error:
    {then}
"""
KEPT_AND_RAISED = """
def main():
    try:
        sys.exit(4)
    except SystemExit as error:
        kept = error
        raise
main()
"""
NOTEBOOK = """
def run_cell():
    try:
        fail()
    except ValueError as error:
        sys.last_value = error
run_cell()
"""
DRAIN_FAILS = """
import threading
def shutdown(leaving=False): raise RuntimeError("lost")
life.shutdown = shutdown
"""
NORMAL = "drained"


COPIED = CAUGHT.format(how="sys.exit(3)", then="error = pickle.loads(pickle.dumps(error)); print(error.code)")
SCRIPTS = [
    ("pass", 0, NORMAL),
    ("sys.exit()", 0, NORMAL),
    ("sys.exit(0)", 0, NORMAL),
    ("sys.exit(False)", 0, NORMAL),
    ("exit()", 0, NORMAL),
    ("raise SystemExit", 0, NORMAL),
    ("raise SystemExit(1)", 1, NORMAL),  # no hook can tell; the process has status 1 after a clean end
    ("sys.exit(3)", 3, "abandoned: sys.exit(3)"),
    ("leave(3)", 3, "abandoned: sys.exit(3)"),
    ("sys.exit('no data')", 1, "abandoned: sys.exit('no data')"),
    ("exit(3)", 3, "abandoned: sys.exit(3)"),
    ("quit(3)", 3, "abandoned: sys.exit(3)"),
    ("imported(3)", 3, "abandoned: sys.exit(3)"),
    (KEPT_AND_RAISED, 4, "abandoned: sys.exit(4)"),
    ("try:" + KEPT_AND_RAISED.replace("\n", "\n    ") + "\nfinally:\n    done = 1", 4, "abandoned: sys.exit(4)"),
    ("fail()", 1, "abandoned: ValueError: boom"),
    ("raise KeyboardInterrupt", 130, "abandoned: KeyboardInterrupt: "),
    (CAUGHT.format(how="fail()", then="pass"), 0, NORMAL),
    (CAUGHT.format(how="sys.exit(3)", then="pass"), 0, NORMAL),
    (CAUGHT.format(how="leave(3)", then="kept = error"), 0, NORMAL),
    (CAUGHT.format(how="exit(3)", then="pass"), 0, NORMAL),
    (CAUGHT.format(how="leave(3)", then="sys.exit(0)"), 0, NORMAL),
    (CAUGHT.format(how="leave(3)", then="raise"), 3, "abandoned: sys.exit(3)"),
    (CAUGHT.format(how="fail()", then="sys.last_value = error"), 0, NORMAL),
    (NOTEBOOK, 0, NORMAL),
    (NOTEBOOK + "sys.exit(5)", 5, "abandoned: sys.exit(5)"),
    (DRAIN_FAILS, 1, ""),
    ("import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()", 0, NORMAL),
    (COPIED, 0, f"3\n{NORMAL}"),  # (as pools of processes do)
]
"""A script, the process's status, and what it says."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> list[End]:
    """Of all scripts."""
    return run_scripts(tmp_path_factory.mktemp("ends"), [text for text, _, _ in SCRIPTS], BEFORE, THEN)


@pytest.mark.parametrize("number", range(len(SCRIPTS)), ids=[text.strip().splitlines()[0] for text, _, _ in SCRIPTS])
def test_real_ends(ends: list[End], number: int):
    (_, code, said), end = SCRIPTS[number], ends[number]
    assert end.out.strip("\n") == said, end.err
    assert end.code in {code, -2} if code == 130 else end.code == code, end.err
