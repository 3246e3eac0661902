"""Arms, and what their names mean: rivals, quorums of partial allreduce, algorithms of gossip and of leaders. Pure."""

from __future__ import annotations

from typing import NamedTuple

from hvd_async.algorithms.gossip.config import ALGORITHMS, COMPRESSIONS

ARMS = ("horovod", "ddp", "all", "majority", "solo", "auto")
OUTER = ("local", "slowmo", "diloco")
"""Those that take local steps, and average all ranks while they take the next ones."""
GOSSIP = {name: name for name in ("sgp", "osgp", "dpsgd", "adpsgd", "exact-diffusion", "noloco", *OUTER)}
GOSSIP |= {"local-sgd": "allreduce"}
"""Their algorithms."""
LEADERS = ("lsgd", "easgd")
SYNCHRONOUS = ("horovod", "ddp", "all")
LOCAL_RIVALS = ("post-local-sgd", "decent-dp", "torchft", "torchft-diloco")
"""torch's own post-local SGD, D-PSGD as the package decent-dp has it, torchft's local SGD and DiLoCo: their ranks'
weights differ."""
LOCAL_PERIOD = 4
"""Steps between two averages of local SGD, whoever's it is: that of torch's own example."""
COMPRESSED = (*COMPRESSIONS[1:], "powersgd")
"""Names of compressions that may follow an arm's base."""
RIVALS = ("horovod", "ddp", *LOCAL_RIVALS)
OF_HOSTS = "-hosts"
"""The end of an arm's name whose ranks of a host act as one."""
QUASI_GLOBAL = "-qg"
"""The end of the name of an arm that gossips with quasi-global momentum."""
IN_STEP = ("post-local-sgd", "torchft", "torchft-diloco")
"""They wait for others in the optimizer's step."""


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


def waits_for_nobody(arm: str) -> bool:
    """Return whether under an arm each rank steps at its own pace, whatever the others do."""
    how = gossip_of(arm)
    return arm in LEADERS or (how is not None and ALGORITHMS[how.algorithm].pairs)
