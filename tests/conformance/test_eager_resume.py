"""States saved after cut() with gradients pending, in either binding: no gradient is lost.

Gradients are whole numbers, so that every one that is lost shows. States without gradients: ``test_saved_states``.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import End, saved_at_the_end
from tests.conformance.eager_ranks import SGD, TINY, UNIT, Binding, both
from tests.conformance.gossip_ranks import alike


def whole(rank: int, step: int) -> list[Any]:
    """A gradient for vectors of 2 and 3 elements."""
    drawn = np.random.default_rng([rank, step]).integers(-8, 9, 5).astype(np.float32)
    return [drawn[:2], drawn[2:]]


def vectors(binding: Binding, **options: Any) -> Any:
    """A rank with these."""
    return binding.vectors([2, 3], UNIT, **{"bucket_cap_mb": TINY, **options})


def whole_run(binding: Binding, steps: Sequence[range], *job: Any, **options: Any) -> list[End]:
    """Train with these as ``saved_at_the_end`` does, which the rest of ``job`` is for."""

    def take(one: Any, rank: int, step: int) -> None:
        one.take(*whole(rank, step))

    return saved_at_the_end(lambda rank: vectors(binding, **options), take, steps, *job)


def total(counts: Sequence[int]) -> list[float]:
    """The weights once the first gradients of each rank, as many as ``counts`` says, are applied."""
    every = [np.concatenate(whole(rank, step)) for rank, count in enumerate(counts) for step in range(count)]
    return [float(x) for x in -sum(every) / len(counts)]


def pending(saved: Any) -> list[int]:
    """How many gradients a state holds in each bucket."""
    state = saved[1]
    if "hvd_async" in state:
        return [len(versions) for versions in state["hvd_async"]["versions"]]
    return [len(state.get(f"hvd_async.versions.{bucket}", ())) for bucket in range(len(state["hvd_async.nbytes"]))]


@functools.cache
def cut_with_two_pending(binding: Binding, slow: int = 1, compression: str = "none") -> list[Any]:
    """States of two ranks that cut after 6 steps, and the slow one after 2, which are both pending."""
    options = {"compression": getattr(binding.hvd.Compression, compression)}
    steps = [range((6, 2)[rank == slow]) for rank in range(2)]
    ends = whole_run(binding, steps, (), "cut", slow, **options)
    assert [pending(saved) for _, saved, _ in ends] == [[2, 2] if rank == slow else [0, 0] for rank in range(2)]
    assert [opt.rounds for _, _, opt in ends] == [6, 6]
    return [saved for _, saved, _ in ends]


@both
@pytest.mark.parametrize(
    ("quorum", "slow", "again", "compression"),
    [("solo", 1, False, "none"), ("majority", 0, True, "none"), ("all", 1, True, "none"), ("solo", 1, True, "bf16")],
)
def test_a_cut_and_a_resumed_job_lose_no_gradient(binding, quorum, slow, again, compression):
    options = {"quorum": quorum, "compression": getattr(binding.hvd.Compression, compression)}
    counts = [(6, 2)[rank == slow] for rank in range(2)]
    states = cut_with_two_pending(binding, slow, compression)
    if again:  # cut at once: what was pending still is
        states = [saved for _, saved, _ in whole_run(binding, [range(0)] * 2, states, "cut", **options)]
    ends = whole_run(binding, [range(count, count + 4) for count in counts], states, "drain", **options)
    for rank, (weights, _, opt) in enumerate(ends):
        assert weights == total([count + 4 for count in counts])
        stats = opt.stats()
        assert stats.gradients_applied == stats.total_produced == 8 + 2
        assert stats.gradients_produced == (6 if rank == slow else 4)
        assert min(stats.staleness) >= 0
        assert opt.rounds == 6 + stats.rounds


@both
def test_what_was_pending_goes_out_by_the_rate_of_one_rank(binding):
    """A state may be loaded again; where the ranks' rates differ, a round has one of them."""
    states = cut_with_two_pending(binding)

    def train(rank: int) -> list[float]:
        one = vectors(binding)
        one.load(states[rank])
        one.set_rate(1.0 + rank)
        one.opt.drain()
        return one.weights().tolist()

    alike(train, 2)


@both
def test_what_was_pending_survives_a_mismatch_that_is_fixed(binding):
    """And goes out in a drain without any step."""
    states = cut_with_two_pending(binding)

    def train(rank: int) -> list[float]:
        one = vectors(binding)
        one.load(states[rank])
        right = np.asarray(states[rank][0][0])
        one.assign(0, right + rank)
        with pytest.raises(ReplicaMismatchError):
            one.opt.drain()
        one.assign(0, right)
        one.opt.drain()
        return one.weights().tolist()

    assert Cluster(2).run(train) == [total([6, 2])] * 2


@both
def test_a_state_with_pending_gradients_goes_to_its_own_rank_and_size_and_buckets_only(binding):
    saved = cut_with_two_pending(binding)[1]

    def reported(size: int, **options: Any) -> list[str]:
        """Errors of the ranks that load it."""

        def load(rank: int) -> str:
            try:
                vectors(binding, **options).load(saved)
            except ValueError as error:
                return str(error)
            return ""

        return Cluster(size).run(load)

    said = r"rank 1 of 2 after cut\(\), with 2 gradient\(s\) pending; on rank {} of {} they .*save after drain\(\)"
    assert reported(2)[1] == ""
    for size, rank in ((1, 0), (2, 0), (3, 1)):
        assert re.search(said.format(rank, size), reported(size)[rank])
    assert re.search(
        r"pending in buckets of .* wrap it with the same bucket_cap_mb, groups", reported(2, bucket_cap_mb=25.0)[1]
    )


@both
@pytest.mark.parametrize("options", [{"quorum": "all"}, {"max_staleness": 0}])
def test_a_state_in_mid_training_lacks_nothing_where_no_gradient_is_late(binding, options):
    """(In other jobs it is refused: ``test_weights_resume``.)"""

    def train(rank: int) -> None:
        trainer = binding.trainer(SGD, **options)
        trainer.train(rank, range(3))
        assert not any(pending(trainer.saved()))
        trainer.opt.drain()

    Cluster(2).run(train)


@both
def test_a_state_that_lacks_gradients_says_how_many_or_that_other_ranks_may_have_some(binding):
    late = threading.Event()

    def train(rank: int) -> str:
        one = binding.vectors([1], SGD)
        worker = one.opt._async.worker_now()
        if rank == 0:
            one.take(1.0)
            late.set()
        else:
            assert late.wait(60)
            worker.engine.wait(lambda: worker.has_available)
            one.take(1.0)  # it comes too late for round 1, and no rank starts another
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*cut\(\)") as caught:
            one.saved()
        one.opt.drain()
        return str(caught.value)

    texts = Cluster(2).run(train)
    assert "other ranks may have some, which would be lost" in texts[0]
    assert "1 of this rank's would be lost" in texts[1]
