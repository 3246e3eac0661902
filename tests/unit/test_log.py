"""Lines for readers: written at once where they are read, and blocking nothing where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from hvd_async.runtime.log import LONGEST, PACKAGE, printable, users_line

FULL = """
import os, sys
from hvd_async.runtime.log import warn
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 65536)
except BlockingIOError:
    pass
os.set_blocking(2, True)
for number in range({lines}):
    warn(f"line {{number}}")
print("continued", flush=True)
"""


def fill(lines: int) -> subprocess.Popen[bytes]:
    """A process with this many lines to say, whose stderr is full."""
    return subprocess.Popen([sys.executable, "-c", FULL.format(lines=lines)], stdout=-1, stderr=-1)


def test_a_full_stderr_that_no_rank_reads_stops_no_rank():
    with fill(5_000) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read() == b"continued\n"
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_what_waits_for_a_reader_comes_in_order_and_what_is_too_much_is_counted():
    with fill(1_500) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"continued\n"  # (it waits a second for a reader before it ends)
        reported = process.stderr.read().lstrip(b"x").decode().splitlines()
        assert process.wait(30) == 0
    kept = [f"hvd_async: line {number}" for number in range(len(reported) - 1)]
    assert reported[:-1] == kept
    assert reported[-1] == f"hvd_async: {1_500 - len(kept)} more lines were dropped: stderr was not read"


@pytest.mark.parametrize(
    ("code", "status", "lines"),
    [
        ("warn('last words'); os._exit(0)", 0, ["last words"]),
        ("warn('last words'); os.kill(os.getpid(), 9)", -9, ["last words"]),
        ("atexit.register(lambda: warn('last words'))", 0, ["last words"]),
        ("warn('parent'); child = os.fork(); child or warn('child'); child or os._exit(0); os.waitpid(child, 0)", 0,
         ["parent", "child"]),
        ("os.close(2); warn('anybody?')", 0, []),
    ],
)  # fmt: skip
def test_a_line_is_out_whatever_the_process_does_next(code: str, status: int, lines: list[str]):
    program = f"import atexit, os\nfrom hvd_async.runtime.log import warn\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()) == (status, [f"hvd_async: {line}" for line in lines])


def test_text_is_one_line_of_bounded_length():
    assert printable("a\nb\x1b[2J\u202e é") == "a\\nb\\x1b[2J\\u202e é"
    assert len(printable("\n" * 10**6)) < LONGEST + 10
    assert printable("x" * (LONGEST + 1)).endswith("x [...]")
    assert printable("x" * LONGEST) == "x" * LONGEST


@pytest.mark.parametrize(
    ("file", "level"),
    [
        (f"{PACKAGE.rstrip(os.sep)}_tools.py", 1),  # a script next to the package, whatever its name begins with
        # (a scheduler of torch calls step(), and the line of user code is where the scheduler was called)
        ("/env/lib/site-packages/torch/optim/lr_scheduler.py", 2),
    ],
)
def test_an_installed_package_is_not_user_code(file: str, level: int):
    script: dict[str, Any] = {"users_line": users_line}
    exec(compile("def level():\n    return users_line()", file, "exec"), script)
    assert script["level"]() == level
