"""The equations in float64 NumPy, written from the frameworks' documentation: it replays the rounds a rank applied.

g is a round's average gradient, x the weights, eta the learning rate, mu momentum, lambda weight decay.

A round of k gradients g_j of P ranks is (1/P) sum_j g_j; weighted by samples n_j it is (k/P) sum_j n_j g_j / sum_j n_j.

torch (docs of ``torch.optim.SGD`` and ``torch.optim.Adam``): decay is coupled, ``g <- g + lambda x``.
    SGD:      b <- mu b + g (b = g at first);  nesterov: g <- g + mu b, else g <- b;  x <- x - eta g
    Adam:     m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
              x <- x - eta (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps),  eps = 1e-8
Keras 3 (``keras.optimizers.SGD``, ``Adam``): decay is decoupled and comes first, ``x <- x - eta lambda x``.
    SGD:      b <- mu b - eta g;  nesterov: x <- x + mu b - eta g, else x <- x + b  (the rate is inside the velocity)
    Adam:     x <- x - eta sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps),  eps = 1e-7 (Kingma and Ba, 2015, the
              "epsilon hat" of the paragraph before section 2.1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.conformance.cases import Case

Array = np.ndarray[Any, np.dtype[np.float64]]
BETA_1, BETA_2 = 0.9, 0.999


class State(NamedTuple):
    """Rounds applied, first and second moment (velocity for SGD)."""

    t: int
    first: Array
    second: Array


def start(weights: Array) -> State:
    """Before the first round."""
    return State(0, np.zeros_like(weights), np.zeros_like(weights))


def torch_update(case: Case, x: Array, g: Array, state: State, lr: float) -> tuple[Array, State]:
    """One round in torch's form."""
    g = g + case.weight_decay * x
    t = state.t + 1
    if case.kind == "adam":
        m = BETA_1 * state.first + (1 - BETA_1) * g
        v = BETA_2 * state.second + (1 - BETA_2) * g * g
        x = x - lr * (m / (1 - BETA_1**t)) / (np.sqrt(v / (1 - BETA_2**t)) + 1e-8)
        return x, State(t, m, v)
    b = state.first
    if case.momentum:
        b = g if t == 1 else case.momentum * b + g
        g = g + case.momentum * b if case.nesterov else b
    return x - lr * g, State(t, b, state.second)


def keras_update(case: Case, x: Array, g: Array, state: State, lr: float) -> tuple[Array, State]:
    """One round in Keras' form."""
    x = x - lr * case.weight_decay * x
    t = state.t + 1
    if case.kind == "adam":
        m = BETA_1 * state.first + (1 - BETA_1) * g
        v = BETA_2 * state.second + (1 - BETA_2) * g * g
        rate = lr * np.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
        return x - rate * m / (np.sqrt(v) + 1e-7), State(t, m, v)
    if not case.momentum:
        return x - lr * g, State(t, state.first, state.second)
    b = case.momentum * state.first - lr * g
    return x + (case.momentum * b - lr * g if case.nesterov else b), State(t, b, state.second)


UPDATES = {"torch": torch_update, "keras": keras_update}


class Applied(NamedTuple):
    """A round as a rank applied it: the sum over the ranks with the count at its end, and its learning rate."""

    sums: Array
    lr: float


def weighted(gradients: Sequence[Array], samples: Sequence[int]) -> Array:
    """The sum that a round of these gradients stands for when samples weight it, with the count that ``replay`` reads:
    0 if no gradient has any."""
    shares = np.array(samples, np.float64) / max(1, sum(samples))
    total = len(samples) * sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
    return np.append(total, float(len(samples) * any(samples)))


def replay(framework: str, case: Case, weights: Array, rounds: Iterable[Applied], size: int, ahead: int = 0) -> Array:
    """Return the weights after these rounds; the ones that carried no gradient are not applied.

    Args:
        ahead: T of extrapolated updates: x <- x + u + (c u - c u of the round before), c = mu + ... + mu^T. Decay in
            Keras' form is no part of u.
    """
    x, state = weights.astype(np.float64), start(weights)
    lead, mu = np.zeros_like(x), BETA_1 if case.kind == "adam" else case.momentum
    factor = sum(mu**n for n in range(1, ahead + 1))
    for sums, lr in rounds:
        if sums[-1] > 0.5:
            begun = x - lr * case.weight_decay * x if framework == "keras" else x
            x, state = UPDATES[framework](case, x, sums[:-1] / size, state, lr)
            before, lead = lead, factor * (x - begun)
            x = x + lead - before
    return x


def play(log: Sequence[Sequence[Any]], hit: Callable[[int, Any], bool]) -> None:
    """Apply what each rank has logged, each rank's entries in its own order.

    Args:
        log: by rank.
        hit: applies an entry of a rank; False if another rank's must come first.

    Raises:
        ValueError: there is no such order.
    """
    waiting = {rank: list(reversed(entries)) for rank, entries in enumerate(log)}
    while any(waiting.values()):
        moved = False
        for rank, entries in waiting.items():
            while entries and hit(rank, entries[-1]):
                entries.pop()
                moved = True
        if not moved:
            stuck = "; ".join(f"rank {rank} at {tuple(entries[-1])}" for rank, entries in waiting.items() if entries)
            raise ValueError(f"impossible log: others would have to come first, but never do: {stuck}")
