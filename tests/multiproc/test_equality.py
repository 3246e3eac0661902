"""``quorum="all"`` is synchronous SGD: Horovod's numbers in torch, a NumPy reference's in TensorFlow."""

from __future__ import annotations

import pytest
from launch import RunJob

pytestmark = pytest.mark.multiproc

SETTINGS = [(ranks, transport) for ranks in (2, 3) for transport in ("gloo", "mpi")]


@pytest.mark.parametrize(("ranks", "transport"), SETTINGS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_torch_equals_horovods_distributed_optimizer(job: RunJob, ranks: int, transport: str, optimizer: str) -> None:
    results = job("torch_equality.py", ranks, transport).check().case(optimizer)
    assert max(rank["difference"] for rank in results) <= 1e-6
    assert max(rank["buffers"] for rank in results) <= 1e-5  # running statistics are sums over the same activations
    assert min(rank["moved"] for rank in results) > 0.01  # it did train
    assert len({rank["weights"] for rank in results}) == 1
    assert {rank["rounds"] for rank in results} == {30}


@pytest.mark.parametrize(("ranks", "transport"), SETTINGS)
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "decay"])
def test_tensorflow_equals_a_float64_reference(job: RunJob, ranks: int, transport: str, optimizer: str) -> None:
    results = job("tf_equality.py", ranks, transport).check().case(optimizer)
    assert max(rank["difference"] for rank in results) <= 1e-5
    assert min(rank["moved"] for rank in results) > 0.01  # it did train,
    assert min(rank["alone"] for rank in results) > 0.01  # on gradients that were not the same on all ranks
    assert len({rank["weights"] for rank in results}) == 1
    assert {rank["rounds"] for rank in results} == {30}
