"""``quorum="all"`` is synchronous SGD: Horovod's numbers in torch, a NumPy reference's in TensorFlow."""

from __future__ import annotations

import pytest
from jobs.table import EQUALITIES, Equality
from launch import DEVICE, RunJob

pytestmark = pytest.mark.multiproc

SETTINGS = [(3, "gloo"), (2, "mpi"), *([(1, "gloo")] if DEVICE == "cuda" else [])]
ROUNDING = 1e-3
"""Between a CPU, where Horovod's ranks must be if ours share a GPU, and that GPU, after 30 steps."""


@pytest.mark.parametrize(("ranks", "transport"), SETTINGS)
@pytest.mark.parametrize("case", EQUALITIES, ids=lambda case: case.name)
def test_torch_equals_horovods_distributed_optimizer(job: RunJob, ranks: int, transport: str, case: Equality) -> None:
    results = job("torch_equality.py", ranks, transport).check().case(case.name)
    # (no mean over ranks makes one rank's rounding smaller)
    within = max(case.difference * (1.5 if ranks == 1 else 1), ROUNDING if DEVICE == "cuda" and ranks > 1 else 0.0)
    assert max(rank["difference"] for rank in results) <= within
    # (running statistics are sums over the same activations)
    assert max(rank["buffers"] for rank in results) <= 10 * within
    assert min(rank["moved"] for rank in results) > max(0.01, 2 * case.difference)  # it did train
    assert len({rank["weights"] for rank in results}) == 1
    assert {rank["rounds"] for rank in results} == {30}
    assert {rank["buckets"] for rank in results} == {case.buckets}
    assert {rank["early"] for rank in results} == {30 * case.buckets}  # all of them left during backward()
    whole = next(rank["sent"] for rank in job("torch_equality.py", ranks, transport).case("sgd"))
    if "compression" in case.ours:
        assert results[0]["sent"] < 0.55 * whole


@pytest.mark.parametrize(("ranks", "transport"), SETTINGS)
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "decay"])
def test_tensorflow_equals_a_float64_reference(job: RunJob, ranks: int, transport: str, optimizer: str) -> None:
    results = job("tf_equality.py", ranks, transport).check().case(optimizer)
    assert max(rank["difference"] for rank in results) <= 1e-5
    assert min(rank["moved"] for rank in results) > 0.01  # it did train,
    assert min(rank["alone"] for rank in results) > 0.01  # on gradients that were not the same on all ranks
    assert len({rank["weights"] for rank in results}) == 1
    assert {rank["rounds"] for rank in results} == {30}
