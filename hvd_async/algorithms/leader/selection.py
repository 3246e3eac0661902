"""Loss windows, leaders and groups, strengths of pulls, spreads of learning rates, and the base of the rules."""

from __future__ import annotations

import abc
import math
import numbers
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

ALL_RANKS = -1
"""Group number that means all ranks."""
CENTER = -1
"""Leader number that means EASGD's center."""
NO_LEADER = -2
"""Leader number that means that no rank of the group has recorded a loss."""
Strength: TypeAlias = float | Callable[[int], float]
"""The strength of a pull: a number in [0, 1), or a function of the rank's own step, from 1."""
SPREADS = ("none", "linear", "power")


class LossWindow:
    """Last training losses of a rank, with their mean.

    Args:
        length: maximum number of losses that count.
    """

    def __init__(self, length: int) -> None:
        self._losses: deque[float] = deque(maxlen=length)

    def record(self, loss: float) -> None:
        """Add a loss."""
        self._losses.append(float(loss))

    @property
    def recorded(self) -> list[float]:
        """The losses that count, oldest first."""
        return list(self._losses)

    @property
    def mean(self) -> float | None:
        """Their mean: NaN if one of them is not finite, None if there is none."""
        if not self._losses:
            return None
        if not all(map(math.isfinite, self._losses)):
            return math.nan
        return math.fsum(self._losses) / len(self._losses)


def pick_leader(means: Mapping[int, float], ranks: Sequence[int]) -> int | None:
    """Return the rank with the lowest finite mean loss, the lowest-numbered of several; None if no rank has one.

    Args:
        means: mean losses by rank; some may be missing, or NaN.
        ranks: candidates.
    """
    finite = [(means[rank], rank) for rank in ranks if rank in means and math.isfinite(means[rank])]
    return min(finite)[1] if finite else None


def value_at(strength: Strength, step: int) -> float:
    """Return a strength at a step.

    Raises:
        ValueError: it is not in [0, 1).
    """
    value = strength(step) if callable(strength) else strength
    if isinstance(value, bool) or not isinstance(value, float | numbers.Real) or not 0 <= value < 1:
        raise ValueError(f"a strength must be at least 0 (no pull) and below 1, got {value!r} at step {step}")
    return float(value)


class Strengths:
    """Strengths of pulls: numbers in [0, 1), or functions of this rank's step.

    Args:
        given: strengths by the options' names; names that this class does not have become further attributes.

    Attributes:
        local_pull, global_pull: LSGD's c1 and c2, in the first step after a pull.
        local_prox, global_prox: LSGD's p1 and p2, between pulls, summed over the steps of a period.
        alpha, beta: EASGD's, of a rank towards the center, and of the center towards the ranks' mean.
    """

    local_pull: Strength = 0.1
    global_pull: Strength = 0.1
    local_prox: Strength = 0.1
    global_prox: Strength = 0.1
    alpha: float = 0.0
    beta: float = 0.43

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def at(self, step: int) -> dict[str, float]:
        """Return this class's strengths by name, at a step of this rank, from 1; raises ValueError as ``value_at``."""
        return {name: value_at(getattr(self, name), step) for name in Strengths.__annotations__}


def lr_factor(kind: str, place: int) -> float:
    """Return the factor of a rank's learning rate, by its position, so that some ranks explore farther than others.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in SPREADS:
        raise ValueError(f"lr_spread must be one of {', '.join(map(repr, SPREADS))}, got {kind!r}")
    return {"none": 1.0, "linear": place + 1.0, "power": 2.0**place}[kind]


def groups(group: Any, ranks: Sequence[int], host_size: Callable[[], int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks, as positions in ``ranks``.

    Args:
        group: "host", the number of ranks per group, or the groups themselves: lists of ranks, or process sets.
        ranks: the ranks that share the optimizer.
        host_size: returns the number of ranks per host; called only for "host".

    Raises:
        ValueError: the size does not divide the number of ranks, or the groups are not a partition of the ranks.
    """
    size = len(ranks)
    if group == "host":
        group = host_size()
    if isinstance(group, int) and not isinstance(group, bool):
        if group < 1 or size % group:
            raise ValueError(f"group={group}: groups of {group} do not divide {size} ranks; take a divisor of {size}")
        return tuple(tuple(range(first, first + group)) for first in range(0, size, group))
    if isinstance(group, str) or not isinstance(group, Sequence):
        raise ValueError(f"group must be 'host', a number of ranks per group, or a list of groups, got {group!r}")
    try:
        parts = [tuple(sorted(getattr(part, "ranks", None) or part)) for part in group]
        fits = sorted(rank for part in parts for rank in part) == sorted(ranks) and all(parts)
    except TypeError:  # ranks instead of lists of ranks, or no ranks at all
        fits = False
    if not fits:
        raise ValueError(f"group={group!r}: every one of the ranks {list(ranks)} must be in one group, no group empty")
    return tuple(sorted(tuple(ranks.index(rank) for rank in part) for part in parts))


Vector = Any


class Rule(abc.ABC):
    """Equations of an algorithm over its immutable state, a ``NamedTuple``. Both threads of a rank call them; the
    worker does no arithmetic on weights."""

    @abc.abstractmethod
    def begin(self, weights: Vector) -> Any:
        """Return the state before the first pull; ``weights`` are equal on all ranks."""

    @abc.abstractmethod
    def on_pull(self, state: Any, group: int, own: Vector, result: Vector) -> tuple[Any, tuple[Vector, ...]]:
        """Return a pull's result for ``merge``, and differences to the target, whose lengths are counted.

        The parts of the state that this reads change only by pulls, one after the other; a step may run meanwhile.

        Args:
            state: state before the pull.
            group: group that was pulled; ``ALL_RANKS`` for all.
            own: this rank's weights when the pull was submitted, shape (n,).
            result: the leader's weights, None if this rank leads; with a center, the sum of all ranks' weights.
        """

    def merge(self, state: Any, pulled: Any) -> Any:
        """Return the current state with the result of ``on_pull``."""
        return pulled

    @abc.abstractmethod
    def on_step(self, state: Any, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step, and differences, whose lengths are counted.

        Args:
            state: state when the step took the results of pulls.
            x: weights after the optimizer's update, shape (n,); they may be changed in place.
            step: number of this rank's step, from 1.
            fresh: groups pulled since the previous step.
        """

    def position(self, state: Any, x: Vector) -> Vector:
        """Return the weights from which a pull starts; ``x`` are the weights after the last step."""
        return x

    def after_step(self, state: Any) -> Any:
        """Return the state after a step has taken the parts that are applied only once."""
        return state

    def consensus(self, state: Any) -> Vector:
        """Return the consensus; None if it is the leader's weights, which only the leader has."""
        return None

    @abc.abstractmethod
    def save(self, state: Any) -> tuple[dict[int, Vector], Vector]:
        """Return, for a checkpoint, targets by group, and the force that is not applied yet or None."""

    @abc.abstractmethod
    def restore(self, targets: Mapping[int, Vector], force: Vector) -> Any:
        """Return the state from the values that ``save`` returned."""
