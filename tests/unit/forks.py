"""Scripts, each in a process of its own: one process imports what they share, and forks for each script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FORK = """
import os, sys
codes = []
for case in range({cases}):
    child = os.fork()
    if not child:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{case}}.{{name}}", os.O_CREAT | os.O_WRONLY), stream)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(*codes, flush=True)
    os._exit(0)
"""


class End(NamedTuple):
    """How a script's process ended: its status, and what it has written."""

    code: int
    out: str
    err: str


def run_scripts(
    folder: Path, scripts: Sequence[str], before: str = "", then: str = "", environment: Mapping[str, str] = os.environ
) -> list[End]:
    """Run scripts, which stand in one file, one after the other, each at its top level.

    Args:
        folder: for the file, and for what the scripts write.
        scripts: of each process.
        before: runs in the process that forks.
        then: runs first in each process.
        environment: of all processes.
    """
    parts = [f"if case == {n}:\n{textwrap.indent(text, '    ')}\n" for n, text in enumerate(scripts)]
    (folder / "script.py").write_text("\n".join([before, FORK.format(cases=len(scripts)), then, *parts]))
    line = [sys.executable, "script.py"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    reported = [[(folder / f"{n}.{name}").read_text() for name in ("out", "err")] for n in range(len(scripts))]
    return [End(int(code), *texts) for code, texts in zip(done.stdout.split(), reported, strict=True)]
