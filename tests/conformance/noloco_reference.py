"""NoLoCo in float64 NumPy, as published (Kolehmainen et al., 2025), with all terms of its outer step.

theta is what a rank trains, phi its slow weights, delta its outer momentum (0 at first), W the matrix of the pairs of
an outer step, which is the last of H steps; m the decoded form of a vector, U the wrapped optimizer's update:
    each step:      theta_i <- U(theta_i, g(theta_i))
    the H-th ones:  delta_i <- alpha delta_i + beta sum_j W_ij (theta_j - phi_j) - gamma (phi_i - sum_j W_ij phi_j)
                    phi_i <- phi_i + delta_i,  theta_i <- phi_i
A neighbour that does not take this step counts as one that has what rank i has. gamma = beta. With compression theta_j
is theta_i + m_j - m_i for others.  drain: the mean of theta.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_async.algorithms.gossip.config import GossipConfig
from tests.conformance.gossip_reference import Encode, Outcome, Problem
from tests.conformance.reference import Array, start


def noloco(
    problem: Problem,
    matrices: Sequence[Array],
    counts: Sequence[int],
    config: GossipConfig,
    encode: Encode | None = None,
) -> Outcome:
    """Replay training of ranks that take this many steps each; ``matrices`` one an outer step, in turn."""
    every, lr, momentum = config.gossip_every, config.outer_lr, config.outer_momentum
    theta, states = problem.start.copy(), list(problem.states) or [start(own) for own in problem.start]
    phi, delta, path = theta.copy(), np.zeros_like(theta), [list[Array]() for _ in theta]
    for step in range(1, max(counts) + 1):
        active = [rank for rank, count in enumerate(counts) if count >= step]
        for rank in active:
            gradient = problem.gradient(theta[rank], rank, step)
            theta[rank], states[rank] = problem.update(theta[rank], gradient, states[rank])
        if step % every == 0:
            weights = matrices[(step // every - 1) % len(matrices)]
            sent = {rank: theta[rank] if encode is None else encode(theta[rank], -1, rank, step) for rank in active}
            new = theta.copy()
            for rank in active:
                pull, spread = np.zeros_like(theta[rank]), phi[rank].copy()
                for other in np.flatnonzero(weights[rank]):
                    there = int(other) if other in sent else rank
                    other_theta = theta[rank] + sent[there] - sent[rank]
                    pull = pull + weights[rank, other] * (other_theta - phi[there])
                    spread = spread - weights[rank, other] * phi[there]
                delta[rank] = momentum * delta[rank] + lr * pull - lr * spread
                new[rank] = phi[rank] + delta[rank]
            phi[active] = theta[active] = new[active]
        for rank in active:
            path[rank].append(theta[rank].copy())
    return Outcome(theta, np.ones(len(theta)), path, tuple(states))
