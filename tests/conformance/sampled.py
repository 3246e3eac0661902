"""Ranks whose rounds are weighted by samples, with gradients that tell which of them a round has carried.

Gradient j of a job has 1 in element j of each vector, so a round's sum has the gradient's samples there. So a test
knows what each round has carried, and the float64 reference needs nothing of the library's counts of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conformance.cases import Case
from tests.conformance.drive import Carried, End, saved_at_the_end
from tests.conformance.eager_ranks import NAN, TINY, UNIT, Binding
from tests.conformance.reference import Applied, Array, replay, weighted

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
