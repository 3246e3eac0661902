"""torch: momentum and decay move nothing of a bucket in which a round carried no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import TINY

NAN = float("nan")
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1, foreach=True),
    "fused-adam": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1, fused=True),
}


def full(opt: Any, parameters: list[torch.nn.Parameter]) -> dict[str, list[float]]:
    """Weights and state of each parameter."""
    return {
        str(i): [
            float(v.detach().sum()) for v in (p, *(x for x in opt.state.get(p, {}).values() if torch.is_tensor(x)))
        ]
        for i, p in enumerate(parameters)
    }


@pytest.mark.parametrize("synchronized", [False, True], ids=["step", "synchronize"])
@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_empty_bucket_is_not_moved(make, empty, synchronized):
    """Step 2 is NaN in some buckets, on all ranks; step 3 in one bucket of one rank: there the others' count."""

    def train(rank: int) -> list[dict[str, list[float]]]:
        parameters = [torch.nn.Parameter(torch.full((2,), 1.0 + i)) for i in range(2)]
        opt: Any = hvd.EagerOptimizer(make(parameters), quorum="all", bucket_cap_mb=TINY)
        seen = []
        for step in range(3):
            opt.zero_grad()
            for index, parameter in enumerate(parameters):
                bad = (step == 1 and index in empty) or (step == 2 and index == 0 and rank == 1)
                parameter.grad = torch.full((2,), NAN if bad else 1.0 + rank)
            if synchronized:
                opt.synchronize()
                with opt.skip_synchronize():
                    opt.step()
            else:
                opt.step()
            seen.append(full(opt, parameters))
        opt.drain()
        assert full(opt, parameters) == seen[-1]
        return seen

    first, other = Cluster(2).run(train)
    assert first == other
    for index in range(2):
        after_one, after_two, after_three = (one[str(index)] for one in first)
        assert (after_one == after_two) == (index in empty)
        assert after_three != after_two
