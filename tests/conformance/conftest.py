"""Fixtures of the conformance tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.conformance.drive import tapes

__all__ = ["tapes"]


@pytest.fixture(scope="module")
def quick_garbage_collection() -> Iterator[None]:
    """Leave what was there before a module's tests out of collections: both frameworks are many objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
