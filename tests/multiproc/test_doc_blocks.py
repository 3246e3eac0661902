"""Every block of Python in README.md and docs/*.md runs, at 2 ranks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs.blocks_table import BLOCKS, FENCE, ROOT, found
from launch import Job, RunJob

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def blocks(forked: RunJob) -> Callable[[str], Job]:
    """The job of a framework, which runs once."""
    return functools.cache(lambda framework: forked(framework, "blocks.py", 2, args=("--framework", framework)))


def test_no_block_is_left_out() -> None:
    assert set(found()) == set(BLOCKS), "say in jobs/blocks_table.py what a new block needs to run"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_job_ends_well(blocks: Callable[[str], Job], framework: str) -> None:
    blocks(framework).check()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(blocks: Callable[[str], Job], name: str) -> None:
    for rank in blocks(BLOCKS[name].framework).case(name):
        assert rank["error"] is None, rank["error"]


@pytest.mark.parametrize(("left_out", "resumed"), [("+", False), ("-", True)], ids=["before", "after"])
def test_the_script_for_ddp_runs_before_and_after_its_change(
    launched: RunJob, tmp_path: Path, left_out: str, resumed: bool
) -> None:
    page = (ROOT / "docs" / "from_ddp.md").read_text("utf-8")
    (diff,) = [match[3] for match in FENCE.finditer(page) if match[2] == "diff"]
    script = tmp_path / "train.py"
    lines = [line[1:] for line in diff.splitlines() if not line.startswith(left_out)]
    script.write_text("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *lines]))
    output = launched("torch", str(script), 2, transport="torch").check().output
    accuracies = [float(found) for found in re.findall(r"epoch \d: accuracy (\S+)", output)]
    assert len(accuracies) == 5, output
    assert accuracies[-1] > 0.9
    assert (tmp_path / "last.pt").exists()
    if resumed:
        script.write_text(script.read_text("utf-8").replace("range(first, 5)", "range(first, 6)"))
        output = launched("torch", str(script), 2, transport="torch").check().output
        assert re.findall(r"epoch (\d): accuracy", output) == ["5"]
