"""Names of arms: rivals, quorums of partial allreduce, algorithms of gossip and of leaders. Pure."""

from __future__ import annotations

from typing import NamedTuple

from hvd_async.algorithms.gossip.config import ALGORITHMS, COMPRESSIONS

ARMS = ("horovod", "ddp", "all", "majority", "solo", "auto")
OUTER = ("local", "slowmo", "diloco")
"""Algorithms that take local steps, and average all ranks during the next ones."""
GOSSIP = {name: name for name in ("sgp", "osgp", "dpsgd", "adpsgd", "exact-diffusion", "noloco", *OUTER)}
GOSSIP |= {"local-sgd": "allreduce"}
"""Algorithm of ``GossipOptimizer`` by arm."""
LEADERS = ("lsgd", "easgd")
"""Algorithms of ``LeaderOptimizer``."""
SYNCHRONOUS = ("horovod", "ddp", "all")
LOCAL_RIVALS = ("post-local-sgd", "decent-dp", "torchft", "torchft-diloco")
"""Rivals whose ranks have different weights: torch's post-local SGD, decent-dp's D-PSGD, torchft's local SGD and
DiLoCo."""
LOCAL_PERIOD = 4
"""Steps between two averages of local SGD, in this library and in rivals: the value of torch's example."""
COMPRESSED = (*COMPRESSIONS[1:], "powersgd")
"""Names of compressions that may follow an arm's base."""
RIVALS = ("horovod", "ddp", *LOCAL_RIVALS)
OF_HOSTS = "-hosts"
"""Suffix of arms in which the ranks of a host act as one."""
QUASI_GLOBAL = "-qg"
"""Suffix of gossip arms with quasi-global momentum."""
IN_STEP = ("post-local-sgd", "torchft", "torchft-diloco")
"""Arms whose ranks wait for others in the optimizer's step."""


class Name(NamedTuple):
    """Parsed name of an arm: a base, optionally followed by ``-COMPRESSION``, ``-avgN``, ``-qg`` and ``-hosts``, as in
    ``dpsgd-bf16-avg4``.

    Attributes:
        base: a rival, ``plain``, an algorithm of gossip or of leaders, or a quorum.
        compression: of its messages or gradients.
        average_every: number of steps after which all ranks are averaged; 0: never.
        hosts: whether the ranks of a host act as one.
        quasi_global: whether gossip corrects the momentum.
    """

    base: str
    compression: str = "none"
    average_every: int = 0
    hosts: bool = False
    quasi_global: bool = False


class Gossip(NamedTuple):
    """Gossip arm: arguments of ``GossipOptimizer`` and of ``make_plan``."""

    algorithm: str
    compression: str
    average_every: int
    quasi_global: bool = False


def read_name(arm: str) -> Name:
    """Parse the name of an arm; the base is not checked.

    Raises:
        ValueError: the suffix of a gossip algorithm is not one that gossip supports.
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


def gossip_of(arm: str) -> Gossip | None:
    """Return the gossip options of an arm such as ``sgp`` or ``dpsgd-int8``; None if it does not gossip.

    Raises:
        ValueError: the compression is unknown.
    """
    base, compression, every, _, quasi_global = read_name(arm)
    return Gossip(GOSSIP[base], compression, every, quasi_global) if base in GOSSIP else None


def quorum_of(arm: str) -> str | int | float:
    """Return the ``quorum=`` of an arm of this library: a name, ``k6`` for six ranks, or a fraction such as ``0.75``.

    Raises:
        ValueError: the arm is unknown.
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
        raise ValueError(f"there is no arm {arm!r}: pass {', '.join(ARMS)}, k3 for three ranks, or a fraction")
    return fraction


def waits_for_none(arm: str) -> bool:
    """Return whether each rank of an arm steps at its own pace, independently of the others."""
    how = gossip_of(arm)
    return arm in LEADERS or (how is not None and ALGORITHMS[how.algorithm].pairs)
