"""Outer optimizers: equations by which the mean of what all ranks have learned moves the anchor.

Each rank i goes on from the anchor x and takes H steps, to x_i. Then, with d = mean_i (x - x_i),

    local SGD (Stich, ICLR 2019, Algorithm 1; by epoch: Lin et al., ICLR 2020):  x <- x - d
    SlowMo (Wang et al., ICLR 2020, Algorithm 1):  u <- beta u + d / gamma;  x <- x - alpha gamma u
    DiLoCo (Douillard et al., 2023, Algorithm 1, Nesterov):  b <- mu b + d;  x <- x - lr (d + mu b)

A parameter of which no rank has moved any element since the last average (d = 0) stays where it is, and u or b is 0
there: one that all ranks have frozen does not go on by momentum, and one that is unfrozen later begins without.

gamma is the learning rate of the ranks' own steps, the mean over the H: at the end of a schedule the last one's may be
far from the others'. Their momentum stays with the ranks. A rank takes the new anchor D steps after it has sent
x - x_i, and keeps what it has learned since (DaSGD, Zhou et al., 2020): x_i <- x + (x_i - sent x_i). The vector is
averaged in F fragments, one after the other (Streaming DiLoCo, Douillard et al., 2025; its ranks mix x_i with x when it
comes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

Vector: TypeAlias = Any


class State(NamedTuple):
    """An outer optimizer's state, the same on all ranks.

    Attributes:
        anchor: x, shape (n,).
        momentum: u or b, shape (n,); None where the equations have none.
    """

    anchor: Vector
    momentum: Vector


class Constants(NamedTuple):
    """Constants of an outer step.

    Attributes:
        lr: alpha of SlowMo, lr of DiLoCo.
        momentum: beta, mu.
    """

    lr: float
    momentum: float


Step: TypeAlias = Callable[[State, Vector, float, Constants], State]
"""(State, d, gamma, constants) -> the state after an outer step; nothing is changed in place."""


def local(state: State, d: Vector, gamma: float, constants: Constants) -> State:
    """Return the state with the mean of the ranks' weights as its anchor."""
    return state._replace(anchor=state.anchor - d)


def slowmo(state: State, d: Vector, gamma: float, constants: Constants) -> State:
    """Return the state after a step of SlowMo; a learning rate of 0, as in a warm-up, leaves u as it is."""
    if gamma == 0.0:
        return state._replace(anchor=state.anchor - d)
    u = state.momentum * constants.momentum + d * (1.0 / gamma)
    return State(state.anchor - u * (constants.lr * gamma), u)


def diloco(state: State, d: Vector, gamma: float, constants: Constants) -> State:
    """Return the state after a step of SGD with Nesterov's momentum, for which d is the gradient."""
    b = state.momentum * constants.momentum + d
    return State(state.anchor - (d + b * constants.momentum) * constants.lr, b)


def hold_unmoved(old: State, new: State, d: Vector, parameters: Iterable[slice]) -> None:
    """Undo, in place, an outer step of parameters that no rank has moved: keep their anchor, and no momentum.

    Args:
        old, new: the states before and after the step.
        d: the mean difference.
        parameters: the elements of each.
    """
    if new.momentum is None or new.momentum is old.momentum:  # (SlowMo's, at a learning rate of 0)
        return
    if (d != 0).all():  # (the usual case: one wait for a GPU instead of one a parameter)
        return
    for part in parameters:
        if not d[part].any():
            new.anchor[part], new.momentum[part] = old.anchor[part], 0.0


def merged(anchor: Vector, weights: Vector, sent: Vector) -> Vector:
    """Return a rank's weights when it takes a new anchor: what it has learned since ``sent`` is kept."""
    return anchor + (weights - sent)


class Rhythm(NamedTuple):
    """Steps at which fragments are averaged: fragment f at steps k H + floor(f H / F), fragment 0 first at step H.

    Averages are numbered from 0, in the order of their steps.
    """

    period: int
    fragments: int

    def check(self) -> None:
        """Refuse more fragments than steps.

        Raises:
            ValueError: with a hint.
        """
        if self.fragments > self.period:
            raise ValueError(
                f"fragments={self.fragments} and average_every={self.period}: at a step one fragment is averaged at "
                f"the most; take at most {self.period} fragments, or a larger average_every"
            )

    def until(self, step: int) -> int:
        """Return how many averages there are in steps 1 to ``step``."""
        whole, rest = divmod(step, self.period)
        return whole * self.fragments + sum(self._offset(f) <= rest for f in range(1, self.fragments))

    def step(self, average: int) -> int:
        """Return the step of an average."""
        whole, place = divmod(average, self.fragments)
        return whole * self.period + self._offset(place + 1)

    def fragment(self, average: int) -> int:
        """Return which fragment is averaged."""
        return (average + 1) % self.fragments

    def _offset(self, fragment: int) -> int:
        return fragment * self.period // self.fragments
