"""Push-sum as pure functions: SGP (Assran et al., ICML 2019, Algorithm 1), OSGP, D-PSGD.

Rank i has biased weights x_i and a push-sum weight w_i, 1 at the start. One step of SGP, after x_i <- U(x_i, g_i):

    send to each out-neighbour j (line 4 of Algorithm 1):   (x_i, w_i), which j adds times p_ji; rank i keeps p_ii
    receive (lines 5 and 6):                                x_i <- sum_j p_ij x_j,   w_i <- sum_j p_ij w_j
    model (line 7):                                         z_i = x_i / w_i

Columns of p sum to 1, so sums of x and of w over ranks and messages in flight never change. OSGP receives messages
later, with the p of the step in which they were sent. D-PSGD (Lian et al., NeurIPS 2017, Algorithm 1) has symmetric p,
so w stays 1, and sends the x_i from before the update.

``add(x, y, a)`` of a message format returns x + a y and may reuse the memory of x. ``times(x, a)`` returns a x as a new
vector.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Vector = Any
Add = Callable[[Vector, Vector, float], Vector]
Times = Callable[[Vector, float], Vector]

MIN_WEIGHT = 0.75
"""Push-sum weight below which a rank that receives less than it sends keeps its weights, since z = x / w diverges as w
goes to 0. It then sends empty messages of weight 0."""


class State(NamedTuple):
    """State of a rank.

    Attributes:
        x: biased weights, shape (n,).
        w: push-sum weight.
    """

    x: Vector
    w: float


class Message(NamedTuple):
    """Content of a message: biased weights as the receivers decode them, and the sender's push-sum weight."""

    x: Vector
    w: float


class Sent(NamedTuple):
    """A sent message, and the sum of p over its receivers."""

    message: Message
    p: float


def without(state: State, sent: Sent, add: Add, times: Times = operator.mul) -> State:
    """Return the state without the share that a message carries, made of this state or of an earlier one."""
    (x, w), p = sent
    # a message must not change until it is sent: if it is x itself, x must not change in place
    return State(times(x, 1.0 - p) if x is state.x else add(state.x, x, -p), state.w - p * w)


def receive(state: State, messages: Iterable[tuple[Message, float]], add: Add) -> State:
    """Return the state after receiving messages, each with its edge's weight p, in this order."""
    x, w = state
    for message, p in messages:
        x = add(x, message.x, p)
        w += p * message.w
    return State(x, w)


def model(state: State, times: Times = operator.mul) -> Vector:
    """Return z = x / w."""
    return state.x if state.w == 1.0 else times(state.x, 1.0 / state.w)


def biased(z: Vector, w: float) -> State:
    """Return the state of a model z."""
    return State(z * w, w)


def divided(state: State, ranks: int) -> State:
    """Return the equal part of a state that each of ``ranks`` ranks gets."""
    part = 1.0 / ranks
    return State(state.x * part, state.w * part)


def may_send(w: float, gets_less: bool, ranks: int = 1) -> bool:
    """Return whether the sum of the states of ``ranks`` ranks may send a share.

    Args:
        w: push-sum weight.
        gets_less: whether the sender may receive less than it sends.
        ranks: number of ranks in the sum.
    """
    return not gets_less or w >= MIN_WEIGHT * ranks
