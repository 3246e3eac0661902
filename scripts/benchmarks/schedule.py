"""Who is slow when, and what that costs at best: delay schedules and the bounds that follow from them. Pure.

A schedule is an array [steps, ranks] of seconds: how long each rank computes in each step. All bounds take
communication for free, so nothing can be faster with the same schedule.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_async.algorithms.eager.quorum import initiator, needed
from hvd_async.algorithms.gossip.options import COMPRESSIONS
from hvd_async.algorithms.gossip.plan import make_plan

Schedule = NDArray[np.float64]
ARMS = ("horovod", "ddp", "all", "majority", "solo", "auto")
GOSSIP = ("sgp", "osgp", "dpsgd", "adpsgd")
LEADERS = ("lsgd", "easgd")
FOLLOWING = {
    "lsgd": ("local_period", "global_period", "group", "global_pull"),
    "easgd": ("global_period", "alpha", "beta"),
}
"""What a training may say of these; the rest is the optimizer's default."""
SYNCHRONOUS = ("horovod", "ddp", "all")
LOCAL_RIVALS = ("post-local-sgd", "decent-dp", "torchft")
"""torch's own post-local SGD, D-PSGD as the package decent-dp has it, and torchft's local SGD: their ranks' weights
differ."""
POST_LOCAL_PERIOD = 4
"""Steps between two averages of local SGD: that of torch's own example."""
PACKAGES = {"decent-dp": "decent_dp", "torchft": "torchft"}
"""What rivals are to Python."""
RIVALS = ("horovod", "ddp", *LOCAL_RIVALS)
PLAIN = "plain"
"""torch's optimizer, not wrapped: of one rank."""
IN_BACKWARD = ("ddp", "decent-dp")
"""They wait for others in the backward pass."""
IN_STEP = ("post-local-sgd", "torchft")
"""They wait for others in the optimizer's step."""
REDUCED = ("fp16", "bf16")
"""How gradients may be compressed."""
MUTANT = "drops_late"
"""Of ``solo``: late gradients are lost."""


def quorum_of(arm: str) -> str | int | float:
    """The ``quorum=`` of one of our arms: a name, ``k6`` for six ranks, or a fraction such as ``0.75``.

    Raises:
        ValueError: there is no such arm.
    """
    if arm in ARMS and arm not in RIVALS:
        return arm
    if arm.startswith("k") and arm[1:].isdigit() and int(arm[1:]):
        return int(arm[1:])
    try:
        fraction = float(arm)
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"there is no arm {arm!r}: say {', '.join(ARMS)}, k3 for three ranks, or a fraction")
    return fraction


def compression_of(arm: str) -> tuple[str, str]:
    """(The arm without it, compression): of ``horovod-fp16`` that is ("horovod", "fp16"), of others "none"."""
    base, dash, compression = arm.rpartition("-")
    return (base, compression) if dash and compression in COMPRESSIONS[1:] else (arm, "none")


def gossip_of(arm: str) -> tuple[str, str] | None:
    """(algorithm, compression of its messages) of an arm such as ``sgp`` or ``dpsgd-int8``; None of one that is none.

    Raises:
        ValueError: there is no such compression.
    """
    algorithm, dash, compression = arm.partition("-")
    if algorithm not in GOSSIP:
        return None
    if dash and compression not in COMPRESSIONS[1:]:
        raise ValueError(f"there is no arm {arm!r}: messages of {algorithm} may be {', '.join(COMPRESSIONS[1:])}")
    return algorithm, compression or "none"


def reductions_of(base: str) -> tuple[str, ...]:
    """How an arm that sends gradients may have them compressed: Horovod knows fp16 alone."""
    if base in (*LOCAL_RIVALS, *LEADERS):
        return ()
    return ("fp16",) if base == "horovod" else REDUCED


def eager(arm: str) -> bool:
    """Whether an arm is partial allreduce of ours, with a quorum."""
    return compression_of(arm)[0] not in (*RIVALS, PLAIN, *LEADERS) and gossip_of(arm) is None


def waits_for_nobody(arm: str) -> bool:
    """Whether under an arm each rank steps at its own pace, whatever the others do."""
    how = gossip_of(arm)
    return arm in LEADERS or (how is not None and how[0] == "adpsgd")


def named_arms(text: str, known: Sequence[str]) -> list[str]:
    """The arms of a command line's list, of a case that has arms of its own.

    Raises:
        ValueError: it has no such arm.
    """
    arms = list(dict.fromkeys(arm.strip() for arm in text.split(",") if arm.strip()))
    for arm in arms or [""]:
        if arm not in known:
            raise ValueError(f"there is no arm {arm!r} in this case: say some of {', '.join(known)}")
    return arms


def parse_arms(
    text: str,
    ranks: int,
    rivals: tuple[str, ...] = ("horovod", "ddp"),
    gossip: bool = False,
    leaders: bool = False,
    reduced: bool = False,
) -> list[str]:
    """The arms of a command line's list, each once.

    Args:
        text: names with commas between them.
        ranks: of the job.
        rivals: those that the case has.
        gossip: whether it has those that gossip.
        leaders: whether it has those that follow a leader, or a centre.
        reduced: whether it has those whose gradients are compressed.

    Raises:
        ValueError: an arm that cannot be with so many ranks, or in this case.
    """
    arms = list(dict.fromkeys(arm.strip() for arm in text.split(",") if arm.strip()))
    if not arms:
        raise ValueError(f"no arm was named: say {', '.join(ARMS)}, k3 for three ranks, or a fraction")
    for arm in arms:
        how, (base, compression) = gossip_of(arm), compression_of(arm)
        if (base in RIVALS and base not in rivals) or (how and not gossip) or (base in LEADERS and not leaders):
            raise ValueError(f"the arm {arm!r} is not there in this case")
        if base == "decent-dp" and not pairs_off(ranks):
            raise ValueError(f"{ranks} ranks: the arm {arm} wants 2, 4, 8, ...: in its graph ranks pair off in turn")
        if not installed([base]):
            raise ValueError(f"the arm {arm} needs its package: pip install {base}")
        if how:
            make_plan(ranks, how[0], compression=how[1])
        elif compression != "none" and not (reduced and compression in reductions_of(base)):
            raise ValueError(f"the arm {arm!r} is not there in this case: {base} is not compressed so")
        if not eager(arm):
            continue
        quorum = quorum_of(base)
        if isinstance(quorum, int) and quorum > ranks:
            raise ValueError(f"the arm {arm!r} wants {quorum} of {ranks} ranks")
    return arms


def installed(arms: Sequence[str]) -> list[str]:
    """Those whose package is there, if they need one."""
    return [arm for arm in arms if arm not in PACKAGES or importlib.util.find_spec(PACKAGES[arm])]


def pairs_off(ranks: int) -> bool:
    """Whether so many ranks can be in decent-dp's graph."""
    return ranks > 1 and not ranks & (ranks - 1)


def one_random(steps: int, ranks: int, compute: float, delay: float, seed: int) -> Schedule:
    """Every rank computes for ``compute`` s; in each step one rank, drawn from the seed, takes ``delay`` s more."""
    times = np.full((steps, ranks), compute)
    times[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += delay
    return times


def linear(steps: int, ranks: int, delay: float) -> Schedule:
    """Rank i takes i x ``delay`` s in each step."""
    return np.tile(np.arange(ranks) * delay, (steps, 1))


def own_pace(times: Schedule) -> list[int]:
    """How many steps each rank takes if all train for the same time, together as many as the schedule has."""
    speeds = 1.0 / times.mean(axis=0)
    return [max(1, round(share * times.size)) for share in (speeds / speeds.sum()).tolist()]


def synchronous_seconds(times: Schedule) -> float:
    """The sum over the steps of the slowest rank's time: what no synchronous job can beat."""
    return float(times.max(axis=1).sum())


def slowest_work(times: Schedule) -> float:
    """The largest sum of one rank's own times: what no job can beat in which every rank does every step."""
    return float(times.sum(axis=0).max())


def solo_bound(times: Schedule) -> float:
    """The best speed-up over synchronous that this very schedule allows."""
    return synchronous_seconds(times) / slowest_work(times)


@dataclass(frozen=True)
class Replay:
    """What becomes of a schedule under a quorum.

    Attributes:
        seconds: until every rank has done all its steps.
        wait: seconds that a rank waited in its steps, mean over ranks and steps.
        contributors: ranks that had arrived when a round fired, mean over the rounds.
    """

    seconds: float
    wait: float
    contributors: float


def replay(
    times: Schedule, arm: str, *, max_staleness: int = 16, seed: int = 0, first_round: int = 1, barrier: bool = False
) -> Replay:
    """Play a schedule by eager-SGD's rules, with free communication.

    A rank arrives for step t once it has computed; its step returns when round t has fired. Round t fires when the
    quorum is there and no rank is further back than ``max_staleness`` steps.

    Args:
        times: the schedule.
        arm: its quorum; not "auto", which depends on what is measured.
        max_staleness: rounds.
        seed: of majority's draw.
        first_round: number of the round of the schedule's first step, on which majority's draw depends.
        barrier: whether all ranks begin every step together.
    """
    steps, ranks = times.shape
    arrived, fired = np.zeros(ranks), 0.0
    history: list[NDArray[np.float64]] = []
    waited, contributors = 0.0, 0.0
    for step in range(steps):
        start = np.maximum(arrived, fired)
        if barrier:
            start = np.full(ranks, start.max())
        arrived = start + times[step]
        history.append(arrived)
        fired = _quorum_at(arrived, arm, first_round + step, seed)
        if step + 1 > max_staleness:
            fired = max(fired, float(history[step - max_staleness].max()))
        waited += float(np.maximum(fired - arrived, 0.0).sum())
        contributors += float((arrived <= fired + 1e-9).sum())
    return Replay(max(float(arrived.max()), fired), waited / (steps * ranks), contributors / steps)


def _quorum_at(arrived: NDArray[np.float64], arm: str, round_: int, seed: int) -> float:
    """When the quorum of a round is there."""
    ranks = len(arrived)
    quorum = "all" if arm in SYNCHRONOUS else quorum_of(arm)
    if quorum == "majority":
        return float(arrived[initiator(round_, seed, set(range(ranks)), range(ranks))])
    if isinstance(quorum, str):
        if quorum == "auto":
            raise ValueError("the quorum 'auto' cannot be replayed: it depends on what is measured")
        return float(arrived.min() if quorum == "solo" else arrived.max())
    return float(np.sort(arrived)[needed(quorum, ranks) - 1])


def even_seed(ranks: int, rounds: int, first_round: int, start: int, tries: int = 300) -> int:
    """The seed, of ``tries`` from ``start`` on, by which majority draws the ranks most evenly in these rounds.

    What is expected of majority is so of infinitely many rounds; an even draw comes near to it with few. Even in the
    mean of the rank drawn, which is what contributors depend on, and of its square, which waits depend on.
    """

    def unevenness(seed: int) -> float:
        drawn = np.array([initiator(t, seed, everyone, range(ranks)) for t in range(first_round, first_round + rounds)])
        return float(abs(drawn.mean() / own.mean() - 1) + abs((drawn**2).mean() / (own**2).mean() - 1))

    everyone, own = set(range(ranks)), np.arange(ranks)
    return start if ranks < 2 else min(range(start, start + tries), key=unevenness)
