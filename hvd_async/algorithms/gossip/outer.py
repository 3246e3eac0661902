"""Outer optimizers: the equations by which the mean of all ranks' local changes moves the anchor.

Each rank i starts from the anchor x and takes H steps, to x_i. Then, with d = mean_i (x - x_i),

    local SGD (Stich, ICLR 2019, Algorithm 1; by epoch: Lin et al., ICLR 2020):  x <- x - d
    SlowMo (Wang et al., ICLR 2020, Algorithm 1):  u <- beta u + d / gamma;  x <- x - alpha gamma u
    DiLoCo (Douillard et al., 2023, Algorithm 1, Nesterov):  b <- mu b + d;  x <- x - lr (d + mu b)

A parameter that no rank has moved since the last average keeps its value, and its u or b is set to 0. So a parameter
that all ranks have frozen does not move by momentum, and starts without momentum when it is unfrozen. Each rank reports
which parameters it has moved; d = 0 does not tell, since changes may cancel, or be lost to compression.

gamma is the learning rate of the ranks' own steps, averaged over the H steps: at the end of a schedule the last rate
may differ much from the others. The inner optimizers' momentum stays on the ranks. A rank takes the new anchor D steps
after it has sent x - x_i, and keeps its changes since then (DaSGD, Zhou et al., 2020): x_i <- x + (x_i - sent x_i). The
vector is averaged in F fragments, one after the other (Streaming DiLoCo, Douillard et al., 2025, where ranks instead
mix x_i with the new x).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

Vector: TypeAlias = Any


class State(NamedTuple):
    """State of an outer optimizer, the same on all ranks.

    Attributes:
        anchor: x, shape (n,).
        momentum: u or b, shape (n,); None for local SGD.
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
"""(state, d, gamma, constants) -> the state after an outer step; arguments are not changed in place."""


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
    """Return the state after a step of SGD with Nesterov momentum, with d as the gradient."""
    b = state.momentum * constants.momentum + d
    return State(state.anchor - (d + b * constants.momentum) * constants.lr, b)


def hold_unmoved(old: State, new: State, d: Vector, unmoved: Iterable[slice]) -> None:
    """Undo, in place, an outer step of parameters that no rank has moved: restore the anchor, and set momentum to 0.

    Args:
        old, new: the states before and after the step.
        d: the mean difference, shape (n,).
        unmoved: the elements of each parameter that no rank's optimizer has moved. Where d is not 0, user code has
            changed the weights, or an earlier compression error arrives: the step holds.
    """
    if new.momentum is None or new.momentum is old.momentum:  # (SlowMo's, at a learning rate of 0)
        return
    for part in unmoved:
        if not d[part].any():
            new.anchor[part], new.momentum[part] = old.anchor[part], 0.0


def packed(flags: Sequence[bool]) -> bytes:
    """Return a set of parameters, given whether each is in it, with a bit per parameter."""
    bits = sum(1 << place for place, flag in enumerate(flags) if flag)
    return bits.to_bytes(-(-len(flags) // 8), "little")


def contains(packed_set: bytes, place: int) -> bool:
    """Return whether a packed set contains a parameter, given its place among all parameters."""
    return bool(packed_set[place // 8] >> place % 8 & 1)


def union(packed_sets: Iterable[bytes]) -> bytes:
    """Return the union of packed sets."""
    bits = length = 0
    for one in packed_sets:
        bits, length = bits | int.from_bytes(one, "little"), max(length, len(one))
    return bits.to_bytes(length, "little")


def merged(anchor: Vector, weights: Vector, sent: Vector) -> Vector:
    """Return a rank's weights after it takes a new anchor: its changes since ``sent`` are kept."""
    return anchor + (weights - sent)


class Rhythm(NamedTuple):
    """Schedule of averages: fragment f is averaged at steps k H + floor(f H / F), fragment 0 first at step H.

    Averages are numbered from 0, in the order of their steps.

    Attributes:
        period: H, in steps.
        fragments: F.
    """

    period: int
    fragments: int

    def check(self) -> None:
        """Check that there are at most as many fragments as steps in a period.

        Raises:
            ValueError: there are more.
        """
        if self.fragments > self.period:
            raise ValueError(
                f"fragments must be at most average_every, got {self.fragments} and {self.period}: at most one "
                f"fragment is averaged per step"
            )

    def until(self, step: int) -> int:
        """Return the number of averages in steps 1 to ``step``."""
        whole, rest = divmod(step, self.period)
        return whole * self.fragments + sum(self._offset(f) <= rest for f in range(1, self.fragments))

    def step(self, average: int) -> int:
        """Return the step of an average."""
        whole, place = divmod(average, self.fragments)
        return whole * self.period + self._offset(place + 1)

    def fragment(self, average: int) -> int:
        """Return the fragment of an average."""
        return (average + 1) % self.fragments

    def _offset(self, fragment: int) -> int:
        return fragment * self.period // self.fragments
