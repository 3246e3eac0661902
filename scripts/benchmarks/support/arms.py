"""Arms, and what their names mean: rivals, quorums of partial allreduce, algorithms of gossip and of leaders. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from hvd_async.algorithms.gossip.plan import COMPRESSIONS, make_plan

ARMS = ("horovod", "ddp", "all", "majority", "solo", "auto")
GOSSIP = ("sgp", "osgp", "dpsgd", "adpsgd")
LEADERS = ("lsgd", "easgd")
FOLLOWING = {
    "lsgd": ("local_period", "global_period", "group", "global_pull"),
    "easgd": ("global_period", "alpha", "beta"),
}
"""Settings that a training may have of these; the rest is the optimizer's default."""
SYNCHRONOUS = ("horovod", "ddp", "all")
LOCAL_RIVALS = ("post-local-sgd", "decent-dp", "torchft")
"""torch's own post-local SGD, D-PSGD as the package decent-dp has it, and torchft's local SGD: their ranks' weights
differ."""
POST_LOCAL_PERIOD = 4
"""Steps between two averages of local SGD: that of torch's own example."""
PACKAGES = {"decent-dp": "decent_dp", "torchft": "torchft"}
"""Rivals' packages, by their names in Python."""
RIVALS = ("horovod", "ddp", *LOCAL_RIVALS)
PLAIN = "plain"
"""torch's optimizer, not wrapped: of one rank."""
IN_BACKWARD = ("ddp", "decent-dp")
"""They wait for others in the backward pass."""
IN_STEP = ("post-local-sgd", "torchft")
"""They wait for others in the optimizer's step."""
REDUCED = ("fp16", "bf16")
"""How gradients may be compressed."""
WARM_UP = 3
"""Untimed steps at the start of a block: ranks meet, DDP orders its buckets, Horovod fills its cache."""
MUTANT = "drops_late"
"""A variant of ``solo`` that loses late gradients."""


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
    """Return whether an arm is partial allreduce of ours, with a quorum."""
    return compression_of(arm)[0] not in (*RIVALS, PLAIN, *LEADERS) and gossip_of(arm) is None


def waits_for_nobody(arm: str) -> bool:
    """Return whether under an arm each rank steps at its own pace, whatever the others do."""
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


def need_arm(baseline: str, arms: Sequence[str]) -> None:
    """Check that the arm which others are compared with is one of these.

    Raises:
        ValueError: it is not.
    """
    if baseline not in arms:
        raise ValueError(f"--arms: the case needs the arm {baseline!r}, to which the others are compared")


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
        leaders: whether it has those that follow a leader, or a center.
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
    """Return those whose package is there, if they need one."""
    return [arm for arm in arms if arm not in PACKAGES or importlib.util.find_spec(PACKAGES[arm])]


def pairs_off(ranks: int) -> bool:
    """Return whether so many ranks can be in decent-dp's graph."""
    return ranks > 1 and not ranks & (ranks - 1)
