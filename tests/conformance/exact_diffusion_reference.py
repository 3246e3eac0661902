"""Exact diffusion in float64 NumPy: as published, and edge by edge, of ranks that end early and steps between.

Published (Yuan, Ying, Zhao and Sayed, 2019, Part I, Algorithm 1), with U the wrapped optimizer's update and Wbar:
    psi <- U(x, g(x));  phi = psi + x - psi of the step before (at first x itself);  x <- Wbar phi
Edge by edge, sent each H-th step, with m the decoded form of phi, and f of each edge 0 at first:
    each step:       phi_i = U(x_i, g(x_i)) + s sum_j wbar_ij f_ij / H,  s = 1 while the learning rate stays
    the H-th ones:   x_i = phi_i + sum_j wbar_ij (m_j - m_i),  f_ij <- f_ij + m_j - m_i  over j that take this step too;
                     of j whose last step was K: x_i <- x_i - wbar_ij f_ij (step - K) / H, and f_ij <- 0
    averaging:       at the end of a step, x <- sum x / A over the A ranks that take this step
    drain:           as of j whose last step was K, for all that are left;  x <- mean of x
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.conformance.gossip_reference import Encode, Outcome, Problem
from tests.conformance.reference import Array, start


def published(problem: Problem, weights: Array, steps: int) -> Outcome:
    """All ranks take as many steps, and combine in each; ``weights`` are Wbar."""
    x, states = problem.start.copy(), list(problem.states) or [start(own) for own in problem.start]
    psi, path = x.copy(), list[Array]()
    for step in range(1, steps + 1):
        new = np.empty_like(x)
        for rank, own in enumerate(x):
            new[rank], states[rank] = problem.update(own, problem.gradient(own, rank, step), states[rank])
        x, psi = weights @ (new + x - psi), new
        path.append(x)
    return Outcome(x, np.ones(len(x)), [[row[rank] for row in path] for rank in range(len(x))], tuple(states))


def exact_diffusion(
    problem: Problem,
    weights: Array,
    counts: Sequence[int],
    *,
    every: int = 1,
    average_every: int = 0,
    encode: Encode | None = None,
    shares: Sequence[float] = (),
) -> Outcome:
    """Replay training edge by edge.

    Args:
        weights: Wbar.
        counts: steps of each rank.
        every: H.
        average_every: steps, 0 for never.
        encode: compresses messages; the same for all receivers.
        shares: s of each step.
    """
    x, states = problem.start.copy(), list(problem.states) or [start(own) for own in problem.start]
    size, path = len(x), [list[Array]() for _ in x]
    edges = np.where(np.eye(size, dtype=bool), 0.0, weights)
    flows = np.zeros((size, *x.shape))
    for step in range(1, max(counts) + 1):
        active = [rank for rank in range(size) if counts[rank] >= step]
        for rank in active:
            new, states[rank] = problem.update(x[rank], problem.gradient(x[rank], rank, step), states[rank])
            x[rank] = new + (shares[step - 1] if shares else 1.0) * (edges[rank] @ flows[rank]) / every
        if step % every == 0:
            sent = {rank: x[rank] if encode is None else encode(x[rank], -1, rank, step) for rank in active}
            x = x.copy()
            for rank in active:
                for other in np.flatnonzero(edges[rank]):
                    if other in sent:
                        x[rank] += edges[rank, other] * (sent[other] - sent[rank])
                        flows[rank, other] += sent[other] - sent[rank]
                    else:
                        x[rank] -= edges[rank, other] * flows[rank, other] * (step - counts[other]) / every
                        flows[rank, other] = 0.0
        if average_every and step % average_every == 0:
            x[active] = x[active].mean(axis=0)
        for rank in active:
            path[rank].append(x[rank].copy())
    for rank in range(size):
        for other in range(size):
            x[rank] -= edges[rank, other] * flows[rank, other] * max(0, counts[rank] - counts[other]) / every
    return Outcome(x, np.ones(size), path, tuple(states))
