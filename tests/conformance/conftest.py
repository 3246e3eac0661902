"""Fixtures of the conformance tests."""

from __future__ import annotations

import gc
import os
import threading
import zlib
from typing import Any

import pytest
from tensorflow.python.framework import func_graph

from hvd_async import testing
from hvd_async.algorithms.eager import rank
from hvd_async.torch import streams
from tests.conformance import fake_gpu
from tests.conformance.drive import tapes

__all__ = ["tapes"]


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> None:
    """Leave what is alive before a module's tests out of collections from now on: both frameworks, and what they keep
    of each graph, are this many objects that one collection takes seconds."""
    gc.collect()
    gc.freeze()


LATE = {
    *("test_eager", "test_eager_promises", "test_eager_options", "test_eager_resume", "test_empty_buckets"),
    *("test_torch_overlap", "test_torch_synchronize", "test_torch_ends", "test_extrapolation", "test_crossings"),
    *("test_gossip", "test_gossip_ends", "test_gossip_switch", "test_weights_resume"),
    *("test_leader", "test_leader_ends", "test_leader_losses"),
}
"""Modules whose tests pass on a late plane. Others count calls in lockstep."""


@pytest.fixture(autouse=True)
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every second test of torch's optimizers on a late plane: by its name, so that it is the same each time.
    There, ranks announce steps from the second one on. Crossings also have a GPU that lags, so that flags come late.

    HVD_ASYNC_TEST_PLANE=late or =early runs all tests of ``LATE`` on one.
    """
    chosen, name = os.environ.get("HVD_ASYNC_TEST_PLANE", ""), request.node.nodeid
    late = zlib.crc32(name.encode()) % 2 == 0 if chosen == "" else chosen == "late"
    if late and request.module.__name__.rpartition(".")[2] in LATE and "keras" not in name.lower():
        monkeypatch.setattr(testing, "MemoryCollectives", fake_gpu.LateCollectives)
        monkeypatch.setattr(rank, "STEADY", 0)
        if "test_crossings" in name:
            monkeypatch.setattr(streams, "gpu", fake_gpu.FakeGpu(lags=True))


@pytest.fixture
def rank_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for Horovod's functions that Keras' callbacks call, where Horovod is not initialized."""
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 2)


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
