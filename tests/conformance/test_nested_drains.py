"""A drain inside a step or a drain, as a signal handler or a hook calls it, is refused; training continues."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.weight_ranks import TorchRank, both

WORDS = r"signal handler or a hook.*set a flag"


KINDS = [("EagerOptimizer", {"quorum": "all"}), ("GossipOptimizer", {"algorithm": "dpsgd", "topology": "ring"})]


@pytest.mark.parametrize("call", ["step", "drain"])
@pytest.mark.parametrize(("wrapper", "options"), KINDS, ids=["eager", "gossip"])
@both
def test_a_drain_while_this_rank_waits_is_refused_and_changes_nothing(binding, wrapper, options, call):
    problem, refused = binding.least_squares(2), threading.Event()

    def train(rank: int, interrupted: bool) -> bytes:
        one = binding(problem, rank, wrapper=wrapper, **options).train(1)

        def handler() -> None:
            with pytest.raises(ReplicaStateError, match=WORDS):
                one.opt.drain()
            refused.set()

        if interrupted and rank == 0:
            changed: Any = local_engine().changed
            wait = changed.wait

            def first_wait(timeout: float | None = None) -> bool:
                """Wait after the handler, as after a signal's."""
                changed.wait = wait
                handler()
                return wait(timeout)

            changed.wait = first_wait
        elif interrupted:
            assert refused.wait(30.0)
        one.step() if call == "step" else one.opt.drain()
        return one.train(1).drained()

    plain = Cluster(2).run(lambda rank: train(rank, False))
    assert Cluster(2).run(lambda rank: train(rank, True)) == plain
    assert refused.is_set()


@pytest.mark.parametrize("wrapper", ["EagerOptimizer", "GossipOptimizer"])
def test_a_drain_in_a_step_hook_is_refused(wrapper):
    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(1), rank, wrapper=wrapper)
        one.opt.register_step_post_hook(lambda *_: one.opt.drain())
        with pytest.raises(ReplicaStateError, match=WORDS):
            one.step()
        one.opt.discard()

    Cluster(1).run(train)
