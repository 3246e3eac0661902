"""Rounds weighted by samples next to all else that an EagerOptimizer does: each round is that of the float64 reference,
whichever gradients it carries.

Gradient j of a job has 1 in element j of each vector, so a round's sum has the gradient's samples there. So a test
knows what each round has carried, and the reference needs nothing of the library's counts of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import torch

from hvd_async.testing import InjectedError
from tests.conformance.cases import Case
from tests.conformance.drive import Carried, End, saved_at_the_end
from tests.conformance.eager_ranks import INF, KERAS, KERAS_GRAPH, MOMENTUM, NAN, TINY, TORCH, UNIT, Binding, both
from tests.conformance.fake_gpu import FakeGpu
from tests.conformance.reference import Applied, Array, replay, weighted
from tests.conformance.torch_ranks import ProcessSet
from tests.conftest import LONG_RUN

VECTORS, VALUES = 2, 3
"""Vectors of a rank, each a bucket of its own, and the elements of each next to the ones that name gradients."""


@dataclass(frozen=True)
class Plan:
    """A job's gradients.

    Attributes:
        samples: by rank, of each of its steps.
        spoilt: (rank, step, vector) of the ones that hold NaN.
    """

    samples: Sequence[Sequence[int]]
    spoilt: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Rank and step of each gradient, by its number."""
        return [(rank, step) for rank, own in enumerate(self.samples) for step in range(len(own))]

    @property
    def size(self) -> int:
        """Elements of a vector."""
        return len(self.steps) + VALUES

    def gradient(self, rank: int, step: int, vector: int) -> Array:
        """A gradient's vector; that of no sample is NaN, as a mean of nothing is."""
        if self.samples[rank][step] == 0 or (rank, step, vector) in self.spoilt:
            return np.full(self.size, NAN)
        named = np.zeros(len(self.steps))
        named[self.steps.index((rank, step))] = 1.0
        return np.append(named, np.random.default_rng([rank, step, vector]).normal(size=VALUES))


def take(one: Any, plan: Plan, rank: int, step: int) -> None:
    """A step of a rank."""
    one.samples = plan.samples[rank][step]
    one.take(*(plan.gradient(rank, step, vector) for vector in range(VECTORS)))


def train(
    binding: Binding,
    plan: Plan,
    steps: Sequence[range] = (),
    states: Sequence[Any] = (),
    end: str = "drain",
    slow: int | None = None,
    case: Case = UNIT,
    options: Callable[[int], dict[str, Any]] = lambda rank: {},
    step: Callable[[Any, Plan, int, int], None] = take,
) -> list[End]:
    """Train as ``saved_at_the_end`` does.

    Args:
        steps: of each rank; all of the plan's if there are none.
        options: of a rank.
        step: takes one.
    """

    def make(rank: int) -> Any:
        given = {"weighting": "samples", "bucket_cap_mb": TINY, **options(rank)}
        return binding.vectors([plan.size] * VECTORS, case, **given)

    ranges = steps or [range(len(own)) for own in plan.samples]
    return saved_at_the_end(make, lambda one, rank, number: step(one, plan, rank, number), ranges, states, end, slow)


def check(
    binding: Binding,
    plan: Plan,
    carried: Sequence[Carried],
    weights: Sequence[float],
    case: Case = UNIT,
    members: Sequence[int] = (),
    change: Callable[[Array], Array] = lambda average: average,
    ahead: float = 0,
) -> None:
    """Every gradient was carried once, by its samples, and the weights are the reference's.

    Args:
        carried: the rounds that these weights have seen.
        members: the ranks that share the optimizer; none for all.
        change: as ``round_transform``, of a round's average.
        ahead: rounds by which updates are extrapolated.
    """
    ranks = members or range(len(plan.samples))
    for vector, own in enumerate(np.split(np.array(weights), VECTORS)):
        bucket = VECTORS - 1 - vector
        applied, seen, empty = [], [], 0
        for round_ in carried:
            sums = round_.sums[bucket]
            numbers = [int(n) for n in np.flatnonzero(sums[: len(plan.steps)])]
            samples = [plan.samples[rank][step] for rank, step in (plan.steps[n] for n in numbers)]
            np.testing.assert_allclose(sums[numbers], samples, rtol=1e-6)
            without = round_.counts[bucket] - len(numbers)
            gradients = [plan.gradient(*plan.steps[n], vector) for n in numbers] + [np.zeros(plan.size)] * without
            *total, count = weighted(gradients, samples + [0] * without)
            average = change(np.array(total) / len(ranks))
            applied.append(Applied(np.append(average * len(ranks), count), case.lr))
            seen += numbers
            empty += without
        given = [n for n, one in enumerate(plan.steps) if one[0] in ranks and (*one, vector) not in plan.spoilt]
        some = [n for n in given if plan.samples[plan.steps[n][0]][plan.steps[n][1]]]
        assert sorted(seen) == some, "gradients lost, or carried twice"
        assert empty == len(given) - len(some), "empty batches that did not count as arrived, or counted twice"
        expected = replay(binding.framework, case, np.zeros(plan.size), applied, len(ranks), int(ahead))
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5)


# -- jobs -----------------------------------------------------------------------------------------------------

EVEN = Plan(((3, 40, 1, 7), (8, 0, 2**20, 2), (1, 9, 5, 64), (30, 2, 0, 11)))
UNEVEN = Plan(((3, 40, 1, 7), (), (8, 0)))


JOBS: list[tuple[Plan, int | None, dict[str, Any]]] = [
    (EVEN, None, {"quorum": "all"}),
    (EVEN, None, {"quorum": "solo"}),
    (EVEN, 2, {"quorum": "solo"}),
    (EVEN, None, {"quorum": "majority"}),
    (EVEN, 3, {"quorum": 2, "max_staleness": 8, "weight_prediction": 2}),
    (EVEN, None, {"hierarchical": 2}),
    (EVEN, None, {"hierarchical": 2, "quorum": "all"}),
    (EVEN, None, {"quorum": "solo", "max_staleness": 0}),
    (EVEN, 1, {"pace": "rounds", "grace": 0.002}),
    (UNEVEN, None, {"quorum": "all"}),
    (UNEVEN, 0, {"quorum": "solo"}),
]
TURNS = [(TORCH, *job) for job in JOBS[::2]] + [(KERAS, *job) for job in JOBS[1::2]]
TURNS += [(TORCH, *JOBS[3]), (KERAS, *JOBS[2]), (KERAS_GRAPH, *JOBS[2])]


@pytest.mark.parametrize(
    ("binding", "plan", "slow", "options"),
    TURNS if not LONG_RUN else [(binding, *job) for binding in (TORCH, KERAS) for job in JOBS],
    ids=lambda one: one.framework if isinstance(one, Binding) else str(one),
)
def test_each_round_is_the_references(binding, plan, slow, options, tapes):
    """Late gradients, hosts, ranks that end early or have no batch; momentum, which shows what moved in which round."""
    ends = train(binding, plan, slow=slow, case=MOMENTUM, options=lambda rank: options)
    for rank, (weights, _, opt) in enumerate(ends):
        assert weights == ends[0].weights, "replicas differ"
        check(binding, plan, tapes[rank].carried, weights, MOMENTUM, ahead=opt.settings["weight_prediction"])
        assert opt.stats().gradients_applied == opt.stats().total_produced == len(plan.steps)
    if slow is not None:
        assert max(ends[slow].opt.stats().staleness) > 0, "the example has lost its point"


@both
@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_nan_leaves_out_its_bucket_and_its_samples(binding, quorum, tapes):
    """In one bucket, in both, in one of all ranks."""
    spoilt = {(0, 0, 1), (1, 2, 0), (1, 2, 1), *((rank, 3, 0) for rank in range(4))}
    plan = Plan(EVEN.samples, frozenset(spoilt))
    for rank, (weights, _, opt) in enumerate(train(binding, plan, case=MOMENTUM, options=lambda _: {"quorum": quorum})):
        check(binding, plan, tapes[rank].carried, weights, MOMENTUM, ahead=opt.settings["weight_prediction"])
        assert opt.stats().gradients_skipped == len({step for own, step, _ in spoilt if own == rank})


@both
@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_process_sets_are_weighted_separately(binding, quorum, tapes):
    sets = [ProcessSet(0, 2, number=1), ProcessSet(1, 3, number=2)]
    ends = train(binding, EVEN, options=lambda rank: {"quorum": quorum, "process_set": sets[rank % 2]})
    for rank, (weights, _, _) in enumerate(ends):
        check(binding, EVEN, tapes[rank].carried, weights, members=sets[rank % 2].ranks)


@both
def test_a_cut_keeps_what_is_pending_with_its_samples(binding, tapes):
    """Rank 1's two gradients are pending at the cut, and go with those of the resumed job."""
    plan = Plan(((3, 40, 1, 7, 2, 90), (8, 0, 250, 2, 6, 1), (1, 9, 5, 64, 2, 2)))
    steps = [range(4), range(2), range(4)]
    options = {"quorum": "solo"}
    states = [end.saved for end in train(binding, plan, steps, (), "cut", 1, options=lambda rank: options)]
    again = [range(4, 6), range(2, 6), range(4, 6)]
    for rank, end in enumerate(train(binding, plan, again, states, options=lambda rank: options)):
        check(binding, plan, tapes[rank].carried, end.weights)


@both
def test_a_state_with_gradients_pending_goes_to_the_same_weighting_only(binding):
    states = [end.saved for end in train(binding, EVEN, (), (), "cut", 1, options=lambda rank: {"quorum": "solo"})]
    # (all ranks refuse it; one may hear first that another has)
    with pytest.raises((ValueError, InjectedError), match="the same bucket_cap_mb, groups, compression and weighting"):
        train(binding, EVEN, (), states, options=lambda rank: {"weighting": "ranks"})


def test_synchronize_shows_the_weighted_round(tapes):
    """Horovod's idiom in torch; what is shown is clipped by hand."""

    def step(one: Any, plan: Plan, rank: int, number: int) -> None:
        one.samples = plan.samples[rank][number]
        one.backward([[plan.gradient(rank, number, vector) for vector in range(VECTORS)]])
        one.opt.synchronize()
        torch.nn.utils.clip_grad_value_(one.parameters, 0.1)
        with one.opt.skip_synchronize():
            one.opt.step()

    for rank, end in enumerate(train(TORCH, EVEN, options=lambda rank: {"quorum": "all"}, step=step)):
        check(TORCH, EVEN, tapes[rank].carried, end.weights, change=lambda average: np.clip(average, -0.1, 0.1))


# -- loss scaling ---------------------------------------------------------------------------------------------

OVERFLOWS = {(1, 2), (3, 0)}
"""Rank and step of gradients that overflow, in one bucket; then none of the step's goes out."""
SCALED = Plan(EVEN.samples, frozenset((*one, vector) for one in OVERFLOWS for vector in range(VECTORS)))


@pytest.mark.parametrize(("quorum", "device"), [("all", "cpu"), ("solo", "cpu"), ("all", "gpu")])
def test_an_overflow_under_a_grad_scaler_leaves_out_its_samples(quorum, device, tapes):
    """The mean of nothing, which the scaler takes for an overflow, is an empty batch as usual."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (2 + rank), growth_interval=10**6) for rank in range(4)]

    def step(one: Any, plan: Plan, rank: int, number: int) -> None:
        one.samples, scale = plan.samples[rank][number], scalers[rank].scale(torch.ones(())).numpy()
        given = [EVEN.gradient(rank, number, vector) * scale for vector in range(VECTORS)]
        if (rank, number) in OVERFLOWS:
            given[0] = np.full(plan.size, INF)
        one.backward([given])
        scalers[rank].step(one.opt)
        scalers[rank].update()

    options = [{"quorum": quorum, "scaler": scaler} for scaler in scalers]
    with FakeGpu().installed() if device == "gpu" else contextlib.nullcontext():
        ends = train(TORCH, SCALED, options=options.__getitem__, step=step)
    for rank, end in enumerate(ends):
        check(TORCH, SCALED, tapes[rank].carried, end.weights)
        assert end.opt.stats().gradients_skipped == rank % 2


@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_an_overflow_under_a_loss_scale_optimizer_leaves_out_its_samples(quorum, tapes):
    def scaled(variables: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)

    def step(one: Any, plan: Plan, rank: int, number: int) -> None:
        one.samples, scale = plan.samples[rank][number], float(one.opt.scale_loss(1.0))
        given = [EVEN.gradient(rank, number, vector) * scale for vector in range(VECTORS)]
        if (rank, number) in OVERFLOWS:
            given[0] = np.full(plan.size, INF)
        one.take(*given)

    ends = train(KERAS, SCALED, case=scaled, options=lambda rank: {"quorum": quorum}, step=step)
    for rank, end in enumerate(ends):
        check(KERAS, SCALED, tapes[rank].carried, end.weights)
        assert end.opt.stats().gradients_skipped == rank % 2
        assert float(end.opt.dynamic_scale.numpy()) == (4.0 if rank % 2 else 8.0)
