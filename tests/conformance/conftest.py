"""Fixtures of the conformance tests."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from tensorflow.python.framework import func_graph

from tests.conformance.drive import tapes

__all__ = ["tapes"]


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> None:
    """Leave what is alive before a module's tests out of collections from now on: both frameworks, and what they keep
    of each graph, are this many objects that one collection takes seconds."""
    gc.collect()
    gc.freeze()


_trace, _tracing = func_graph.func_graph_from_py_func, threading.RLock()
PATIENCE = 30.0
"""Seconds that a rank waits for another's trace. (If that waited for this rank, both would continue then.)"""


def _trace_alone(*args: Any, **options: Any) -> Any:
    held = _tracing.acquire(timeout=PATIENCE)
    try:
        return _trace(*args, **options)
    finally:
        if held:
            _tracing.release()


# Ranks are threads here, and TensorFlow has crashed (in graph_def_versions) while two of them built graphs. In a job
# each rank has a process of its own.
func_graph.func_graph_from_py_func = _trace_alone
