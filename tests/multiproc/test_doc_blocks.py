"""Every block of Python in README.md and docs/*.md runs, at 2 ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from jobs.blocks_table import BLOCKS, found
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
