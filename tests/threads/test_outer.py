"""Local steps and outer optimizers of ranks as threads: every step equals the reference, whatever comes late."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.gossip.config import ALGORITHMS as ALL
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.algorithms.gossip.outer import Rhythm
from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from tests.conformance.outer_reference import Compress, Outer, TwoStages, due, of_config, train
from tests.conftest import LONG_RUN, examples
from tests.covering import covering
from tests.threads.gossip_holdups import GATE_TIMEOUT
from tests.threads.gossip_workload import EXACT, Job, Record, check_sums, job, run

OUTER = [name for name, algorithm in ALL.items() if algorithm.outer is not None]


def compress_of(one: Job) -> Compress | None:
    """Return what a job's messages make of differences."""
    config, size = one.plan.config, one.size
    if config.compression == "none":
        return None
    post = NumpyMessageFormat(one.elements, np.float64, config.compression, size, parts=one.plan.parts)
    return TwoStages(one.elements, config.fragments, size, lambda part: post.decode(post.encode(part)))


def check(one: Job, records: list[Record], within: dict[str, float] = EXACT) -> None:
    """Each step and drain equals the reference; ranks that drained have the same bits."""
    problem, outer = one.problem, of_config(one.plan.config)
    for end, counts in enumerate(one.steps):
        segments, compress = [record.segments[end] for record in records], compress_of(one)
        outcome = train(problem, counts, outer, compress, one.plan.config.local_size)
        for segment, path in zip(segments, outcome.path, strict=True):
            np.testing.assert_allclose(np.array(segment.path), np.array(path), **within)
            assert segment.z.tobytes() == segments[0].z.tobytes()
        left = compress.errors if isinstance(compress, TwoStages) else 0.0
        np.testing.assert_allclose(segments[0].z, (outcome.x - left).mean(axis=0), **within)
        problem = problem.after(outcome)
        problem.start[:] = segments[0].z


RHYTHMS: dict[str, dict[str, Any]] = {
    "on time": {"max_staleness": 0},
    "late": {},
    "two fragments": {"max_staleness": 2, "fragments": 2},
    "three fragments": {"max_staleness": 2, "fragments": 3},
    "four fragments": {"fragments": 4},
}
STEPS = (
    ((13,),),
    ((13,) * 2,),
    ((13, 0, 3, 8),),
    ((0, 0, 0, 0), (9, 2, 2, 1), (0, 3, 0, 0)),
    ((9,) * 5, (1, 7, 12, 2, 9), (8,) * 5),
)
"""Of the ranks, before each end."""


@pytest.mark.parametrize(
    ("algorithm", "rhythm", "steps"), covering((OUTER, tuple(RHYTHMS), STEPS), 3 if LONG_RUN else 2), ids=str
)
def test_every_step_equals_the_reference(algorithm: str, rhythm: str, steps: Any):
    one = job(steps, algorithm, None, average_every=4, **RHYTHMS[rhythm])
    records = run(one, jitter=0.001)
    check(one, records)
    late, due_at = one.plan.config.max_staleness, Rhythm(4, one.plan.config.fragments)
    for record in records if len(steps) == 1 else ():
        last = len(record.segments[0].path)
        assert all(step - due_at.step(number) == late for step, number in record.segments[0].log if step < last)


@pytest.mark.parametrize(
    ("algorithm", "rhythm", "compression"),
    covering((OUTER, ("on time", "three fragments"), ("fp16", "bf16", "int8")), 3 if LONG_RUN else 2),
)
def test_compressed_differences_equal_the_reference(algorithm: str, rhythm: str, compression: str):
    """Several chunks of 8 bits, parts that are not full, and a rank that finishes early but still adds up its part."""
    steps, more = ((9, 9, 9), (9, 4, 9)), RHYTHMS[rhythm]
    one = job(steps, algorithm, None, average_every=4, compression=compression, elements=6500, **more)
    check(one, run(one, jitter=0.001), {"rtol": 1e-6, "atol": 1e-6})


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_what_a_rank_that_has_finished_leaves_out_does_not_pile_up(compression: str):
    """It adds up its part of all that the others do, and has no difference any more that could carry its errors."""
    one = job((4, 160, 160), "local", None, average_every=4, compression=compression, elements=12)
    records, compress = run(one), compress_of(one)
    check(one, records, {"rtol": 1e-6, "atol": 1e-6})
    assert isinstance(compress, TwoStages)
    train(one.problem, one.steps[0], of_config(one.plan.config), compress)
    gone, *others = np.abs(compress.errors).reshape(3, 3, 4)[[0, 1, 2], [0, 1, 2]].max(axis=1)
    assert gone <= 2 * max(others)


@pytest.mark.parametrize("local_size", [1, 2, 3, 6])
@pytest.mark.parametrize("compression", ["none", "fp16", "int8"])
@pytest.mark.parametrize("algorithm", OUTER)
def test_hosts_equal_the_reference(algorithm: str, compression: str, local_size: int):
    """Ranks and hosts finish early. (``machines`` checks that ranks of a host hold the same bits.)"""
    more = {"average_every": 4, "fragments": 2, "elements": 13, "local_size": local_size}
    one = job(((9,) * 6, (5, 3, 9, 2, 0, 7), (6,) * 6), algorithm, None, compression=compression, **more)
    check(one, run(one, jitter=0.001), {"rtol": 1e-6, "atol": 1e-6} if compression == "int8" else EXACT)


def test_slow_momentum_is_in_units_of_a_whole_periods_gradients():
    """A rate that is nearly 0 just where ranks send, as at the end of a cosine, does not make a huge momentum."""

    def rate(step: int) -> float:
        return 1e-9 if step % 4 == 0 else 0.05

    def tweak(worker: Any) -> None:
        worker.learning_rates = lambda: [(6, rate(worker._base + worker._step))]

    more = {"average_every": 4, "fragments": 2}
    one = job(((6,) * 3, (7,) * 3, (9,) * 3), "slowmo", None, cuts=frozenset({0}), **more)
    outer = of_config(one.plan.config)
    outer.rate = lambda step: float(np.mean([rate(k) for k in range(max(1, step - 3), step + 1)]))
    records, problem = run(one, tweak=tweak), one.problem
    for ends, count in ((slice(0, 2), 13), (slice(2, 3), 9)):
        outcome = train(problem, (count,) * 3, outer)
        for record, path in zip(records, outcome.path, strict=True):
            np.testing.assert_allclose([z for each in record.segments[ends] for z in each.path], path, **EXACT)
        problem = problem.after(outcome)
    resumed = run(job((7,) * 3, "slowmo", None, **more), tweak=tweak, resumed=[record.saved[0] for record in records])
    for record, again in zip(records, resumed, strict=True):
        assert [z.tobytes() for z in record.segments[1].path] == [z.tobytes() for z in again.segments[0].path]
    assert np.abs(outer.momentum_of).max() < 1e3


@settings(max_examples=examples(40))
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(1, 6),
    st.sampled_from(["none", "fp16", "bf16", "int8"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_local_sgd_keeps_the_mean(size, every, late, fragments, compression, segments, elements):
    """Whatever is late, averaged in fragments or compressed: weights move by local updates alone. Error feedback: what
    no message has carried is in the next one, or in the drain."""
    fragments, steps = min(fragments, every), tuple((count,) * size for count in segments)
    options = {"average_every": every, "max_staleness": late, "fragments": fragments, "compression": compression}
    one = job(steps, "local", None, elements=elements, cuts=frozenset(range(len(steps) - 1)), **options)
    mean = one.problem.start.mean(axis=0)
    records = run(one)
    moved = sum(segment.moved for record in records for segment in record.segments) / size
    np.testing.assert_allclose(records[0].segments[-1].z, mean + moved, rtol=1e-6, atol=1e-6)
    assert len({record.segments[-1].z.tobytes() for record in records}) == 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60))
def test_averages_have_numbers_in_the_order_of_their_steps(every, fragments, until):
    rhythm = Rhythm(every, min(every, fragments))
    outer = Outer("local", every, 0, rhythm.fragments)
    expected = [(step, fragment) for step in range(1, until + 1) for fragment in due(outer, step)]
    assert [(rhythm.step(n), rhythm.fragment(n)) for n in range(rhythm.until(until))] == expected


def test_bytes_are_those_of_two_stages():
    """Each stage sends all parts but a rank's own."""
    for compression, part in (("none", 8 * 2), ("bf16", 2 * 2), ("int8", 2048 + 4)):
        one = job((8, 8, 8), "local", None, average_every=4, compression=compression)
        for record in run(one):
            assert record.stats.bytes_sent == 2 * 2 * 2 * (part + (16 if compression != "none" else 0))
            assert record.stats.averagings == 2
    check_sums(one, run(one))


STEPS, MORE = 4, 40
"""Steps of a rank that finishes early, and of the others."""


class Waits:
    """The others step only while no more than this many averages wait on rank 0, once it has finished.

    Args:
        most: averages.

    Attributes:
        followed: averages that rank 0 has taken in ends.
    """

    def __init__(self, most: int) -> None:
        self._most, self._taken = most, threading.Condition()
        self._first: Any = None
        self.followed = 0

    def tweak(self, worker: Any) -> None:
        """Watch rank 0's worker."""
        assert isinstance(worker, OuterWorker)
        if worker.engine.rank:
            return
        self._first, take = worker, worker._take

        def taken(*args: Any) -> None:
            take(*args)
            with self._taken:
                self.followed += worker._moved is not None
                self._taken.notify_all()

        worker._take = taken  # type: ignore[method-assign]

    def before_step(self, place: int, step: int, worker: Any) -> None:
        """Wait for rank 0 to take averages."""
        if place and step > STEPS:
            with self._taken:
                assert self._taken.wait_for(lambda: len(self._first._averages.results()) <= self._most, GATE_TIMEOUT), (
                    "averages pile up on a rank that has finished"
                )


@pytest.mark.parametrize(
    ("algorithm", "more", "cut"),
    [
        (algorithm, RHYTHMS[rhythm], cut)
        for algorithm, rhythm, cut in covering((OUTER, ("late", "three fragments", "on time"), (False, True)), 2)
    ],
    ids=str,
)
def test_averages_do_not_pile_up_on_a_rank_that_has_finished(
    algorithm: str, more: dict[str, Any], cut: bool, monkeypatch: Any
) -> None:
    """No more wait than a rank that continues may have under way; what comes out is as if all were taken last."""
    ends = ((STEPS, MORE, MORE), (9, 9, 9))
    one = job(ends, algorithm, None, average_every=4, cuts=frozenset({0} if cut else ()), **more)
    waits = Waits(one.plan.config.fragments)
    records = run(one, tweak=waits.tweak, before_step=waits.before_step)
    assert waits.followed >= (MORE - STEPS) // 4 - 1
    monkeypatch.setattr(OuterWorker, "_follows", False)
    for record, last in zip(records, run(one), strict=True):
        for segment, other in zip(record.segments, last.segments, strict=True):
            np.testing.assert_allclose(np.array(segment.path), np.array(other.path), **EXACT)
            np.testing.assert_allclose(segment.z, other.z, **EXACT)
