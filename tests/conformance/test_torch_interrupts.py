"""torch: Ctrl-C at any line of backward's hooks and of ``step()``; training continues then, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import TINY
from tests.conftest import LONG_RUN
from tests.threads.interrupting import SIMULATED, Interrupt

WITHOUT = (*SIMULATED, "runtime/memory.py")
"""(memory.py runs in finalizers, where Python ignores an interrupt.)"""
EVERY = 1 if LONG_RUN else 5
"""Lines between two interrupts: all of them take half a minute."""


def train(interrupt: Interrupt, one_by_one: bool) -> tuple[str, list[float], list[int]]:
    """Four steps, the second interrupted; how it ended, the weights, and the gradients applied in their buckets."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    opt: Any = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), max_staleness=0, bucket_cap_mb=TINY)

    def step() -> None:
        if one_by_one:
            opt.synchronize()
            with opt.skip_synchronize():
                opt.step()
        else:
            opt.step()

    def once() -> None:
        opt.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()
        step()

    def interrupted(call: Callable[[], None]) -> None:
        try:
            with interrupt.armed():
                call()
        except KeyboardInterrupt:
            return

    try:
        for number in range(4):
            if number == 1:
                interrupted(once)
                if opt._async.worker.gone and opt._async.worker.whole.fine:
                    with pytest.raises(ReplicaStateError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
                        opt.zero_grad()
                    step()
            else:
                once()
        opt.drain()
    except ReplicaStateError as error:
        said = str(error)
        how = "broken" if "restart from a checkpoint" in said else said
    else:
        how = "right"
    return how, [-parameter.item() for parameter in reversed(parameters)], opt._async.worker.applied


@pytest.mark.filterwarnings("ignore:drain.. applied")
@pytest.mark.parametrize("one_by_one", [False, True], ids=["step", "synchronize"])
def test_an_interrupt_at_any_line_of_a_step(one_by_one):
    seen = set()
    for line in range(0, 10_000, EVERY):
        interrupt = Interrupt(line, without=WITHOUT)
        ((how, weights, applied),) = Cluster(1).run(lambda rank, i=interrupt: train(i, one_by_one), timeout=120)
        if not interrupt.struck:
            assert line > 100, "nothing was traced"
            break
        seen.add(how)
        if how == "right":
            # (what backward did not come to is a zero gradient; a round that synchronize() has shown and that no
            # step has applied is left out)
            assert all(count - 1 <= weight <= count for weight, count in zip(weights, applied, strict=True)), line
            assert set(applied) <= {3, 4}
    assert seen == {"right", "broken"}
