"""Arms, and what their names mean: rivals, quorums of partial allreduce, algorithms of gossip and of leaders. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from hvd_async.algorithms.gossip.options import COMPRESSIONS
from hvd_async.algorithms.gossip.plan import make_plan

ARMS = ("horovod", "ddp", "all", "majority", "solo", "auto")
OUTER = ("local", "slowmo", "diloco")
"""Those that take local steps, and average all ranks while they take the next ones."""
GOSSIP = {name: name for name in ("sgp", "osgp", "dpsgd", "adpsgd", "exact-diffusion", "noloco", *OUTER)}
GOSSIP |= {"local-sgd": "allreduce"}
"""Their algorithms."""
LEADERS = ("lsgd", "easgd")
FOLLOWING = {
    "lsgd": ("local_period", "global_period", "group", "global_pull"),
    "easgd": ("global_period", "alpha", "beta"),
}
"""Settings that a training may have of these; the rest is the optimizer's default."""
SYNCHRONOUS = ("horovod", "ddp", "all")
LOCAL_RIVALS = ("post-local-sgd", "decent-dp", "torchft", "torchft-diloco")
"""torch's own post-local SGD, D-PSGD as the package decent-dp has it, torchft's local SGD and DiLoCo: their ranks'
weights differ."""
LOCAL_PERIOD = 4
"""Steps between two averages of local SGD, whoever's it is: that of torch's own example."""
PACKAGES = {"decent-dp": "decent_dp", "torchft": "torchft", "torchft-diloco": "torchft"}
"""Rivals' packages, by their names in Python."""
COMPRESSED = (*COMPRESSIONS[1:], "powersgd")
"""Names of compressions that may follow an arm's base."""
RIVALS = ("horovod", "ddp", *LOCAL_RIVALS)
OF_HOSTS = "-hosts"
"""The end of an arm's name whose ranks of a host act as one."""
QUASI_GLOBAL = "-qg"
"""The end of the name of an arm that gossips with quasi-global momentum."""
PLAIN = "plain"
"""torch's optimizer, not wrapped: of one rank."""
IN_BACKWARD = ("ddp", "decent-dp")
"""They wait for others in the backward pass."""
IN_STEP = ("post-local-sgd", "torchft", "torchft-diloco")
"""They wait for others in the optimizer's step."""
REDUCTIONS = {"horovod": ("fp16",), "ddp": ("fp16", "bf16", "powersgd")} | dict.fromkeys((*LOCAL_RIVALS, *LEADERS), ())
"""How those that send gradients may have them compressed: Horovod knows fp16 alone, DDP's hooks PowerSGD too."""
REDUCED = ("fp16", "bf16")
"""How partial allreduce may."""
WARM_UP = 3
"""Untimed steps at the start of a block: ranks meet, DDP orders its buckets, Horovod fills its cache."""
MUTANT = "drops_late"
"""A variant of ``solo`` that loses late gradients."""


class Name(NamedTuple):
    """An arm's name, read: a base, then perhaps ``-COMPRESSION``, ``-avgN``, ``-qg`` and ``-hosts``, as in
    ``dpsgd-bf16-avg4``.

    Attributes:
        base: a rival, ``plain``, an algorithm of gossip or of leaders, or a quorum.
        compression: of what it sends.
        average_every: steps after which all ranks are averaged; 0: never.
        hosts: whether the ranks of a host act as one.
        quasi_global: whether gossip corrects the momentum.
    """

    base: str
    compression: str = "none"
    average_every: int = 0
    hosts: bool = False
    quasi_global: bool = False


class Gossip(NamedTuple):
    """An arm that gossips: arguments of ``GossipOptimizer`` and of ``make_plan``."""

    algorithm: str
    compression: str
    average_every: int
    quasi_global: bool = False


def read_name(arm: str) -> Name:
    """Return what an arm's name says; whether there is such a base is not looked at.

    Raises:
        ValueError: an algorithm of gossip is followed by what none of them has.
    """
    rest, compression, every = arm.removesuffix(OF_HOSTS), "none", 0
    quasi_global, rest = rest.endswith(QUASI_GLOBAL), rest.removesuffix(QUASI_GLOBAL)
    head, _, last = rest.rpartition("-avg")
    if head and last.isdigit():
        rest, every = head, int(last)
    head, _, last = rest.rpartition("-")
    if head and last in COMPRESSED:
        rest, compression = head, last
    if rest not in GOSSIP and rest.partition("-")[0] in GOSSIP:
        algorithm = rest.partition("-")[0]
        known = ", ".join(COMPRESSIONS[1:])
        raise ValueError(f"there is no arm {arm!r}: messages of {algorithm} may be {known}; -avg4 may come last")
    every = every or LOCAL_PERIOD * (rest in ("local-sgd", *OUTER))
    return Name(rest, compression, every, arm.endswith(OF_HOSTS), quasi_global)


def compression_of(arm: str) -> tuple[str, str]:
    """(The arm's base, compression): of ``horovod-fp16`` that is ("horovod", "fp16"), of others "none"."""
    return read_name(arm)[:2]


def gossip_of(arm: str) -> Gossip | None:
    """Return what an arm such as ``sgp`` or ``dpsgd-int8`` does; None of one that does not gossip.

    Raises:
        ValueError: there is no such compression.
    """
    base, compression, every, _, quasi_global = read_name(arm)
    return Gossip(GOSSIP[base], compression, every, quasi_global) if base in GOSSIP else None


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


def groups_in(arm: str, group: int | None, ranks: int) -> bool:
    """Return whether an arm makes process sets: its leaders lead so many ranks each, and not only one or all."""
    return group is not None and "group" in FOLLOWING.get(arm, ()) and 1 < group < ranks


def eager(arm: str) -> bool:
    """Return whether an arm is partial allreduce of ours, with a quorum."""
    return read_name(arm).base not in (*RIVALS, PLAIN, *LEADERS, *GOSSIP)


def own_weights(arm: str) -> bool:
    """Return whether under an arm each rank has weights of its own, whose mean stands for all."""
    base = read_name(arm).base
    return base in LOCAL_RIVALS or base in LEADERS or base in GOSSIP


def waits_for_nobody(arm: str) -> bool:
    """Return whether under an arm each rank steps at its own pace, whatever the others do."""
    how = gossip_of(arm)
    return arm in LEADERS or (how is not None and how.algorithm == "adpsgd")


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
    local_size: int = 1,
) -> list[str]:
    """The arms of a command line's list, each once.

    Args:
        text: names with commas between them.
        ranks: of the job.
        rivals: those that the case has.
        gossip: whether it has those that gossip.
        leaders: whether it has those that follow a leader, or a center.
        reduced: whether it has those whose gradients are compressed.
        local_size: ranks of a host, of which arms ``-hosts`` make one.

    Raises:
        ValueError: an arm that cannot be with so many ranks, or in this case.
    """
    arms = list(dict.fromkeys(arm.strip() for arm in text.split(",") if arm.strip()))
    if not arms:
        raise ValueError(f"no arm was named: say {', '.join(ARMS)}, k3 for three ranks, or a fraction")
    for arm in arms:
        how, (base, compression, every, hosts, quasi_global) = gossip_of(arm), read_name(arm)
        if hosts and (local_size == 1 or base in (*RIVALS, *LEADERS, "local-sgd", *OUTER)):
            raise ValueError(f"the arm {arm!r} is not there: -hosts is for partial allreduce and gossip, --per-host 2")
        if (base in RIVALS and base not in rivals) or (how and not gossip) or (base in LEADERS and not leaders):
            raise ValueError(f"the arm {arm!r} is not there in this case")
        if base == "decent-dp" and not pairs_off(ranks):
            raise ValueError(f"{ranks} ranks: the arm {arm} wants 2, 4, 8, ...: in its graph ranks pair off in turn")
        if not installed([base]):
            raise ValueError(f"the arm {arm} needs its package: pip install {PACKAGES[base].replace('_', '-')}")
        if how:
            make_plan(ranks, **how._asdict(), local_size=local_size if hosts else 1)
        elif every or quasi_global:
            raise ValueError(f"the arm {arm!r} is not there: -avg4 or -qg is for those that gossip")
        elif compression != "none" and not (reduced and compression in REDUCTIONS.get(base, REDUCED)):
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
