"""Gossip in float64 NumPy: it replays which rank took in which message, and computes what the weights must then be.

Rank j holds biased weights x and a push-sum weight w; the model is z = x / w. U is the wrapped optimizer's update (that
of ``reference.py``), g the gradient at z, ``W[i, j]`` the weight that receiver i gives to what j sends at step k (the
matrix of phase (k - 1) % period), m the decoded form of what was sent: x itself unless messages are compressed.
    sgp:        x <- U(x, g);  send m = x;  x <- x - sum_i W[i, j] m, w <- w - sum_i W[i, j] w (both as sent);
                for each message (s, q) taken in: x <- x + W^(q)[j, s] m_s, w <- w + W^(q)[j, s] w_s
    osgp:       the same, but sent at each tau-th step only, as ``every`` says, and messages of earlier steps are taken
                in before m is sent: all of them, so one an edge is under way (Assran et al., 2019: at most tau late)
    dpsgd:      the same, but m = x from before U (Lian et al., 2017: x_i <- sum_j W_ij x_j - eta g_i(x_i)), which is
                sent a step ahead: also by a rank that is done, of a step that others take
    every = H:  W^(k) is the matrix of phase (k / H - 1) % period at steps k = H, 2 H, .., and I between them
    averaging:  at the end of a step, x <- sum x / A, w <- sum w / A over the A ranks that take this step
    drain:      everything in flight is taken in;  z <- sum x / sum w
    adpsgd:     a shadow y of each host of n ranks (n = 1 without hosts), whose parameters are all p;
                step: y <- y + sum_r (U(p, g_r(p)) - p) / n  of the ranks r that take it, then p <- y;
                a pair (i, j) takes snapshots s, and on arrival y_i <- y_i + (s_j - s_i) / 2; of hosts part by part,
                rank i of one with rank i of the other
    CHOCO:      both ends of an edge keep a copy c (0 at first);  c <- c + Q(x - c);  m = c
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_async import mixing
from tests.conformance.cases import Case
from tests.conformance.reference import UPDATES, Array, State, play, start

Edge = tuple[int, int, int]
"""A message: (receiver, sender, the sender's step)."""
Takes = Sequence[Sequence[Sequence[tuple[int, int]]]]
"""For each rank, for each of its steps, what it took in: (sender, the sender's step)."""
Sends = Sequence[Sequence[Sequence[int]]]
"""For each rank, for each of its steps, to whom it sent."""
Encode = Callable[[Array, int, int, int], Array]
"""(what is sent, receiver, sender, the sender's step) -> what the receiver decodes."""
Log = Sequence[Sequence[Sequence[Any]]]
"""For each rank what hit its shadow, in order: ("step", k), ("sent", round, partner), ("landed", round, partner) and
("average", n), with k and n from 1."""


# -- what is trained, and what comes out ----------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Training problem of all ranks.

    Attributes:
        start: the weights, a row a rank.
        gradient: of (weights, rank, step from 1).
        case: the optimizer, in the form of ``framework`` ("torch" or "keras").
        states: the optimizers' at first, one a rank; none: new ones.
        rate: the learning rate by the step, from 1; None: that of the case.
    """

    start: Array
    gradient: Callable[[Array, int, int], Array]
    case: Case
    framework: str = "torch"
    states: tuple[State, ...] = ()
    rate: Callable[[int], float] | None = None

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return self.case.lr if self.rate is None else self.rate(step)

    def update(self, x: Array, g: Array, state: State) -> tuple[Array, State]:
        """The wrapped optimizer's."""
        return UPDATES[self.framework](self.case, x, g, state, self.lr(state.t + 1))

    def after(self, outcome: Outcome) -> Problem:
        """Rest of the problem after a drain: all at the average, steps from 1 again; data and optimizers continue."""
        done = [len(own) for own in outcome.path]
        return dataclasses.replace(
            self,
            start=np.tile(outcome.drained(), (len(self.start), 1)),
            gradient=lambda z, rank, step: self.gradient(z, rank, done[rank] + step),
            states=outcome.states,
        )


@dataclass(frozen=True)
class Outcome:
    """Where the ranks are, before a drain.

    Attributes:
        x: biased weights (adpsgd: shadows), a row a rank.
        w: push-sum weights.
        path: for each rank what its model held after each of its steps.
        states: the optimizers'.
        flying: what no rank took in, (weights, push-sum weight), the edge's weight applied; in hierarchical runs for
            all ranks of a host together; adpsgd's are by (rank, partner, round).
    """

    x: Array
    w: Array
    path: list[list[Array]]
    states: tuple[State, ...]
    flying: dict[Edge, tuple[Array, float]] = field(default_factory=dict)

    @property
    def z(self) -> Array:
        """The models, a row a rank."""
        return np.asarray(self.x / self.w[:, None])

    def drained(self) -> Array:
        """Weights of all ranks after a drain."""
        late_x, late_w = [part for part, _ in self.flying.values()], [part for _, part in self.flying.values()]
        return drain(np.array([*self.x, *late_x]), np.array([*self.w, *late_w]))


def drain(x: Array, w: Array) -> Array:
    """sum x / sum w over the rows."""
    return np.asarray(x.sum(axis=0) / w.sum())


def batch(rank: int, step: int, elements: int = 6, rows: int = 8) -> tuple[Array, Array]:
    """Each rank's own inputs and targets, exact in float32 too; the ranks' best weights are far apart."""
    best = np.random.default_rng([17, rank]).normal(size=elements)
    random = np.random.default_rng([19, rank, step])
    inputs = (random.normal(size=(rows, elements)) * 0.7).astype(np.float32).astype(np.float64)
    targets = inputs @ best + 0.1 * random.normal(size=rows)
    return inputs, targets.astype(np.float32).astype(np.float64)


def least_squares(size: int, case: Case, framework: str = "torch", elements: int = 6) -> Problem:
    """Half the mean squared error of a linear model without bias on ``batch``; all ranks start at the same weights."""

    def gradient(z: Array, rank: int, step: int) -> Array:
        inputs, targets = batch(rank, step, elements)
        return np.asarray(inputs.T @ (inputs @ z - targets) / len(inputs))

    first = np.random.default_rng(elements).normal(size=elements).astype(np.float32).astype(np.float64)
    return Problem(np.tile(first, (size, 1)), gradient, case, framework)


# -- sgp, osgp, dpsgd, averaging ------------------------------------------------------------------------------


def of_step(matrices: Sequence[Array], step: int, every: int = 1) -> Array:
    """The matrix of a step, from 1, where messages are sent each this many steps."""
    if step % every:
        return np.eye(len(matrices[0]))
    return matrices[(step // every - 1) % len(matrices)]


def on_time(matrices: Sequence[Array], steps: int, late: int = 0, every: int = 1) -> list[list[list[tuple[int, int]]]]:
    """The log of ranks that take in every message exactly ``late`` steps after its own, and nothing at the end;
    ``every`` as of ``of_step``."""

    def sent_to(own: int, sent: int) -> list[tuple[int, int]]:
        weights = of_step(matrices, sent, every)
        return [(int(sender), sent) for sender in np.flatnonzero(weights[own]) if sender != own and sent > 0]

    return [[sent_to(own, step - late) for step in range(1, steps + 1)] for own in range(len(matrices[0]))]


def gossip(
    problem: Problem,
    matrices: Sequence[Array],
    steps: int,
    takes: Takes | None = None,
    *,
    algorithm: str = "sgp",
    sends: Sends | None = None,
    max_staleness: int | None = None,
    overlap: int = 0,
    every: int = 1,
    average_every: int = 0,
    encode: Encode | None = None,
    local_size: int = 1,
) -> Outcome:
    """Replay gossip training, step by step: since no rank may take in a message of a step that it has not reached
    itself, whatever it takes in has been sent by then.

    Args:
        steps: of the rank that took most.
        takes: what a run recorded, also how many steps each rank took; none: each step's messages in that step.
        algorithm: "sgp" (osgp with ``overlap``) or "dpsgd".
        sends: for ranks that left edges out, whose weight stays with the sender; D-PSGD's of one step more. None: all.
        max_staleness: refuse a log in which a message is taken in more steps late, or not at all.
        overlap: osgp's tau; 0 for the others.
        every: steps between two in which messages are sent, if ``overlap`` is not more.
        average_every: steps, 0 for never.
        encode: compresses messages; may have a memory, so a new one for each run.
        local_size: ranks of a host, numbered host by host: averaged after the update, and all else is by host.

    Raises:
        ValueError: the log is impossible; says which message. Or matrices, log and ranks do not fit.
    """
    hosts, left = divmod(len(problem.start), local_size)
    if algorithm not in ("sgp", "dpsgd") or left:
        raise ValueError(f"algorithm={algorithm!r}, local_size={local_size}: take 'sgp' or 'dpsgd', and equal hosts")
    takes = on_time(matrices, steps, every=max(every, overlap)) if takes is None else takes
    _check(matrices, steps, takes, hosts)
    x, w = problem.start.copy(), np.ones(hosts)
    states = list(problem.states) or [start(own) for own in x]
    path: list[list[Array]] = [[] for _ in x]
    flying, taken = dict[Edge, tuple[Array, float]](), set[Edge]()
    members = [range(host * local_size, (host + 1) * local_size) for host in range(hosts)]
    for step in range(1, steps + 1):
        weights = of_step(matrices, step, max(every, overlap))
        active = [host for host in range(hosts) if len(takes[host]) >= step]
        new: dict[int, Array] = {}
        for own in active:
            before = x[members[own]].mean(axis=0)
            for rank in members[own]:
                g = problem.gradient(x[rank] / w[own], rank, step)
                x[rank], states[rank] = problem.update(x[rank], g, states[rank])
            new[own] = x[members[own]].mean(axis=0)
            if overlap:
                part_x, part_w = _take_earlier(flying, taken, takes[own][step - 1], (own, step))
                new[own], w[own] = new[own] + part_x, w[own] + part_w
                if np.count_nonzero(weights[:, own]) > 1 and any(edge[0] == own and edge[2] < step for edge in flying):
                    raise ValueError(f"impossible log: rank {own} sends at step {step} before all it was sent is in")
            content = before if algorithm == "dpsgd" else new[own]
            new[own] = _send(content, new[own], w, weights, (own, step), sends, encode, flying)
        for own in range(hosts):
            if algorithm == "dpsgd" and local_size == 1 and len(takes[own]) == step - 1 > 0:
                x[own] = _send(x[own], x[own], w, weights, (own, step), sends, encode, flying)
        for own in active:
            for sender, sent in takes[own][step - 1]:
                if overlap and sent < step:
                    continue  # (before it has sent its own)
                part_x, part_w = _take(flying, taken, (own, sender, sent), step)
                new[own] = new[own] + part_x
                w[own] += part_w
        late = [edge for edge in flying if edge[0] in active and edge[2] <= step - (max_staleness or 0)]
        if late and max_staleness is not None:
            raise ValueError(f"impossible log: {name(late[0])} is missing at step {step}, {max_staleness=}")
        if average_every and step % average_every == 0:
            mean, w[active] = np.asarray(np.mean(list(new.values()), axis=0)), w[active].mean()
            new = dict.fromkeys(active, mean)
        for own in active:
            for rank in members[own]:
                x[rank] = new[own]
                path[rank].append(new[own] / w[own])
    flying = {edge: (local_size * part_x, local_size * part_w) for edge, (part_x, part_w) in flying.items()}
    return Outcome(x, np.repeat(w, local_size), path, tuple(states), flying)


def _send(
    content: Array,
    x: Array,
    w: Array,
    weights: Array,
    of: tuple[int, int],
    sends: Sends | None,
    encode: Encode | None,
    flying: dict[Edge, tuple[Array, float]],
) -> Array:
    """Have a rank's messages of a step fly; returns x without what they take with them. ``of``: (rank, step)."""
    own, step = of
    weight = w[own]
    for receiver in _receivers(weights, own, step, sends):
        share = float(weights[receiver, own])
        message = content if encode is None else encode(content, receiver, own, step)
        flying[receiver, own, step] = share * message, share * weight
        x = x - share * message
        w[own] -= share * weight
    return x


sgp = functools.partial(gossip, algorithm="sgp")
dpsgd = functools.partial(gossip, algorithm="dpsgd")


def allreduce(problem: Problem, steps: int) -> Outcome:
    """An average at each step, and no gossip."""
    return gossip(problem, [np.eye(len(problem.start))], steps, average_every=1)


def _check(matrices: Sequence[Array], steps: int, takes: Takes, hosts: int) -> None:
    for weights in matrices:
        mixing.check_columns(weights)
    sizes = {len(weights) for weights in matrices} | {len(takes)}
    if sizes != {hosts}:
        raise ValueError(f"matrices and log are of {sorted(sizes)} ranks or hosts, the problem has {hosts}")
    if max(map(len, takes)) != steps:
        raise ValueError(f"takes tells of {[len(own) for own in takes]} steps, the longest must be steps={steps}")


def _receivers(weights: Array, own: int, step: int, sends: Sends | None) -> list[int]:
    neighbours = [int(receiver) for receiver in np.flatnonzero(weights[:, own]) if receiver != own]
    chosen = neighbours if sends is None else list(sends[own][step - 1])
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(neighbours):
        raise ValueError(f"impossible log: rank {own} sends to {chosen} at step {step}, with neighbours {neighbours}")
    return chosen


def _take(flying: dict[Edge, tuple[Array, float]], taken: set[Edge], edge: Edge, step: int) -> tuple[Array, float]:
    if edge not in flying:
        why = "has not reached" if edge[2] > step else "has taken in before" if edge in taken else "was never sent"
        raise ValueError(f"impossible log: rank {edge[0]} takes in at its step {step} what it {why}: {name(edge)}")
    taken.add(edge)
    return flying.pop(edge)


def _take_earlier(
    flying: dict[Edge, tuple[Array, float]], taken: set[Edge], takes: Sequence[tuple[int, int]], of: tuple[int, int]
) -> tuple[Array | float, float]:
    """Sum of a rank's messages of earlier steps that it takes in at a step. ``of``: (rank, step)."""
    own, step = of
    parts = [_take(flying, taken, (own, sender, sent), step) for sender, sent in takes if sent < step]
    return sum(part for part, _ in parts), sum(part for _, part in parts)


def name(edge: Edge) -> str:
    return f"rank {edge[1]}'s message of step {edge[2]} to rank {edge[0]}"


# -- adpsgd ---------------------------------------------------------------------------------------------------


def adpsgd(problem: Problem, log: Log, local_size: int = 1, steps: Sequence[int] = ()) -> Outcome:
    """Replay what hit the ranks' shadows, each rank's in its own order, and a landing only when the partner has sent.

    Args:
        log: with hosts, for each rank of the part that it owns.
        local_size: ranks of a host.
        steps: of each rank; none: as many as its log has, which with hosts are those of the host.

    Raises:
        ValueError: the log is impossible; says what of which rank.
    """
    if len(log) != len(problem.start):
        raise ValueError(f"the log is of {len(log)} ranks, the problem of {len(problem.start)}: give a list for each")
    shadows = Shadows(problem, log, local_size, steps)
    play(log, shadows.hit)
    return shadows.outcome()


class Shadows:
    """The shadow of each rank, and what hits it. With hosts it is its host's, of which only its own part is looked at
    until all parts are put together. A rank that has taken fewer steps than its host changes nothing in the others."""

    def __init__(self, problem: Problem, log: Log, local_size: int, steps: Sequence[int]) -> None:
        self.problem, self.local_size = problem, local_size
        self.steps = list(steps) or [sum(entry[0] == "step" for entry in entries) for entries in log]
        self.shadows, self.params = problem.start.copy(), problem.start.copy()
        self.states = list(problem.states) or [start(own) for own in problem.start]
        self.path: list[list[Array]] = [[] for _ in log]
        self.snapshots: dict[Edge, Array] = {}
        self.landed: set[Edge] = set()
        self.averagings = [0] * len(log)
        self.expected = [sum(entry[0] == "average" for entry in entries) for entries in log]
        self.met: dict[int, dict[int, Array]] = defaultdict(dict)
        part = -(-problem.start.shape[1] // local_size)
        self.parts = [slice(rank % local_size * part, (rank % local_size + 1) * part) for rank in range(len(log))]
        self.done = [0] * len(log)
        """Steps of the host that each rank has added to its part."""
        self.results: dict[tuple[int, int], Array] = {}
        """Each part after each step, by its owner and the step."""
        self.changes: dict[tuple[int, int], Array] = {}
        """By rank and step."""

    def members(self, rank: int) -> range:
        """The ranks of its host."""
        first = rank - rank % self.local_size
        return range(first, first + self.local_size)

    def hit(self, rank: int, entry: Sequence[Any]) -> bool:
        """Apply an entry; False if it must wait for another rank's."""
        match tuple(entry):
            case ("step", number):
                return self._step(rank, number)
            case ("sent", number, partner):
                if (rank, partner, number) in self.snapshots:
                    raise ValueError(f"impossible log: rank {rank} sends to rank {partner} twice in round {number}")
                self.snapshots[rank, partner, number] = self.shadows[rank].copy()
            case ("landed", number, partner):
                return self._land(rank, partner, number)
            case ("average", number):
                return self._average(rank, number)
            case other:
                raise ValueError(f"rank {rank}: {other} is none of step, sent, landed, average with their numbers")
        return True

    def outcome(self) -> Outcome:
        """Return where ranks are: all of a host at its shadow, also one that has finished."""
        left = [rank for rank, steps in enumerate(self.steps) if len(self.path[rank]) != steps]
        if left:
            raise ValueError(f"the log has fewer steps than ranks {left} have taken")
        flying = {
            (rank, partner, number): ((self.snapshots[partner, rank, number] - own) / 2, 0.0)
            for (rank, partner, number), own in self.snapshots.items()
            if (rank, partner, number) not in self.landed and (partner, rank, number) in self.snapshots
        }
        whole = [
            np.concatenate([self.shadows[member][self.parts[member]] for member in self.members(rank)])
            for rank in range(len(self.steps))
        ]
        late = flying if self.local_size == 1 else {}
        return Outcome(np.array(whole), np.ones(len(whole)), self.path, tuple(self.states), late)

    def _step(self, rank: int, number: int) -> bool:
        if number != self.done[rank] + 1:
            raise ValueError(f"impossible log: rank {rank} takes step {number} after step {self.done[rank]}")
        members, part = self.members(rank), self.parts[rank]
        takers = [member for member in members if self.steps[member] >= number]
        if not takers:
            raise ValueError(f"impossible log: rank {rank} takes step {number}, which no rank of its host takes")
        if any(self.done[member] < number - 1 for member in members):
            return False
        self.shadows[rank][part] += sum(self._change(member, number)[part] for member in takers) / self.local_size
        self.results[rank, number], self.done[rank] = self.shadows[rank][part].copy(), number
        if all(self.done[member] >= number for member in members):
            whole = np.concatenate([self.results[member, number] for member in members])
            for member in takers:
                self.params[member] = whole
                self.path[member].append(whole.copy())
        return True

    def _change(self, rank: int, number: int) -> Array:
        if (rank, number) not in self.changes:
            old = self.params[rank].copy()
            gradient = self.problem.gradient(old, rank, number)
            new, self.states[rank] = self.problem.update(old, gradient, self.states[rank])
            self.changes[rank, number] = new - old
        return self.changes[rank, number]

    def _land(self, rank: int, partner: int, number: int) -> bool:
        own, other = (rank, partner, number), (partner, rank, number)
        if own not in self.snapshots or own in self.landed:
            how = "twice" if own in self.landed else f"before rank {rank} has sent its own"
            raise ValueError(f"impossible log: rank {partner}'s of round {number} lands at rank {rank} {how}")
        if other not in self.snapshots:
            return False
        self.landed.add(own)
        self.shadows[rank] += (self.snapshots[other] - self.snapshots[own]) / 2
        return True

    def _average(self, rank: int, number: int) -> bool:
        if number != self.averagings[rank] + 1:
            raise ValueError(f"impossible log: rank {rank} has average {number} after {self.averagings[rank]}")
        met = self.met[number]
        met.setdefault(rank, self.shadows[rank].copy())
        if len(met) < sum(expected >= number for expected in self.expected):
            return False
        self.averagings[rank] = number
        self.params[rank] = self.shadows[rank] = np.mean([met[rank] for rank in sorted(met)], axis=0)
        if self.path[rank]:
            self.path[rank][-1] = self.params[rank].copy()
        return True
