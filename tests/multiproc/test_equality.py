"""``quorum="all"`` is synchronous SGD: Horovod's numbers, in torch. (Those of Keras: ``test_graph_steps``.)"""

from __future__ import annotations

import pytest
from jobs.table import Equality, equalities
from launch import DEVICE, RunJob
from settings import ALONE, TORCH, TORCH_MPI, TORCHRUN, Setting

pytestmark = pytest.mark.multiproc

ROUNDING = 1e-3
"""Between a CPU, where Horovod's ranks must be if ours share a GPU, and that GPU, after 30 steps."""


@pytest.mark.parametrize(
    ("setting", "case"),
    [
        pytest.param(s, case, id=f"{s}-{case.name}")
        for s in (TORCH, TORCH_MPI, TORCHRUN, *ALONE)
        for case in equalities(s.share)
    ],
)
def test_torch_equals_horovods_distributed_optimizer(job: RunJob, setting: Setting, case: Equality) -> None:
    results = setting.case(job, case.name)
    # (no mean over ranks makes one rank's rounding smaller)
    within = max(
        case.difference * (1.5 if setting.ranks == 1 else 1),
        ROUNDING if DEVICE == "cuda" and setting.ranks > 1 else 0.0,
    )
    assert max(rank["difference"] for rank in results) <= within
    # (running statistics are sums over the same activations)
    assert max(rank["buffers"] for rank in results) <= 10 * within
    assert min(rank["moved"] for rank in results) > max(0.01, 2 * case.difference)  # it did train
    assert len({rank["weights"] for rank in results}) == 1
    assert {rank["rounds"] for rank in results} == {30}
    assert {rank["buckets"] for rank in results} == {case.buckets}
    assert {rank["early"] for rank in results} == {30 * case.buckets}  # all of them left during backward()
    whole = next(rank["sent"] for rank in setting.case(job, "sgd"))
    if "compression" in case.ours:
        assert results[0]["sent"] < 0.55 * whole
