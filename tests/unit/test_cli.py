"""The command line as it is called, without ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_async
from hvd_async.cli.main import COMMANDS
from tests.fixtures import frozen

ROOT = Path(__file__).resolve().parents[2]


def called(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Call it as the installed command is: the working directory is not in ``sys.path`` (from Python 3.11 on)."""
    command = [sys.executable, "-m", "hvd_async", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env)


def test_version_and_help():
    assert called("--version").stdout == f"hvd_async {hvd_async.__version__}\n"
    help_text = called("--help").stdout
    assert all(f"\n    {command} " in help_text for command in COMMANDS)
    assert called().returncode == 2


def test_flags_are_the_ones_that_users_know():
    assert frozen.flags() == frozen.FLAGS.read_text("utf-8"), "see tests/fixtures/frozen.py"


@pytest.mark.parametrize("script", ["train.py", "package/train.py", "-m package.train", "-m package"])
def test_a_script_that_makes_no_optimizer_gets_an_error_that_says_so(tmp_path, script):
    """Scripts and modules find their arguments and what they import as without ``record``."""
    (tmp_path / "package").mkdir()
    text = "import os, sys\nimport {0}\nprint(os.path.realpath(sys.argv[0]), sys.argv[1:], {0}.X, __name__)\n"
    for path, imported in {"train.py": "here", "package/train.py": "own", "package/__main__.py": "package.own"}.items():
        (tmp_path / path).write_text(text.format("package.own" if script == "-m package.train" else imported))
    for path in ("here.py", "package/own.py", "package/__init__.py"):
        (tmp_path / path).write_text("X = 7\n")
    done = called("record", "--out", "trace", *script.split(), "-m", "--out", "x", cwd=tmp_path)
    path = {"-m package.train": "package/train.py", "-m package": "package/__main__.py"}.get(script, script)
    assert done.stdout == f"{(tmp_path / path).resolve()} ['-m', '--out', 'x'] 7 __main__\n", done.stderr
    assert done.returncode == 2
    assert "hvd_async record: nothing was recorded" in done.stderr
    assert "RecordCallback" in done.stderr


def test_a_script_that_fails_fails(tmp_path):
    (tmp_path / "train.py").write_text("raise KeyError(3)\n")
    done = called("record", "--out", str(tmp_path / "trace"), str(tmp_path / "train.py"))
    assert done.returncode == 1
    assert "KeyError: 3" in done.stderr
