"""The command line as it is called, without ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hvd_async
from hvd_async.cli.main import COMMANDS
from tests.fixtures import frozen

ROOT = Path(__file__).resolve().parents[2]


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvd_async", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_version_and_help():
    assert called("--version").stdout == f"hvd_async {hvd_async.__version__}\n"
    help_text = called("--help").stdout
    assert all(f"\n    {command} " in help_text for command in COMMANDS)
    assert called().returncode == 2


def test_flags_are_the_ones_that_users_know():
    assert frozen.flags() == frozen.FLAGS.read_text("utf-8"), "see tests/fixtures/frozen.py"


def test_a_script_that_makes_no_optimizer_gets_an_error_that_says_so(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = called("record", "--out", str(tmp_path / "trace"), str(tmp_path / "train.py"), "--out", "x")
    assert "['--out', 'x']" in done.stdout
    assert done.returncode == 2
    assert "hvd_async record: nothing was recorded" in done.stderr
    assert "RecordCallback" in done.stderr


def test_a_script_that_fails_fails(tmp_path):
    (tmp_path / "train.py").write_text("raise KeyError(3)\n")
    done = called("record", "--out", str(tmp_path / "trace"), str(tmp_path / "train.py"))
    assert done.returncode == 1
    assert "KeyError: 3" in done.stderr
