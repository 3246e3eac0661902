"""Fixtures of the conformance tests."""

from __future__ import annotations

import gc

import pytest

from tests.conformance.drive import tapes

__all__ = ["tapes"]


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> None:
    """Leave what is alive before a module's tests out of collections from now on: both frameworks, and what they keep
    of each graph, are so many objects that one collection takes seconds."""
    gc.collect()
    gc.freeze()
