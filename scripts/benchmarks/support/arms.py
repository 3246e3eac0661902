"""Arms of the benchmarks' cases: which a case may have, and what of a package or a set-up they need. Pure.

Their names are read by ``scripts.benchmarks.support.names``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from hvd_async.algorithms.gossip.plan import make_plan
from scripts.benchmarks.support.names import (
    ARMS,
    GOSSIP,
    LEADERS,
    LOCAL_RIVALS,
    RIVALS,
    gossip_of,
    quorum_of,
    read_name,
)

PACKAGES = {"decent-dp": "decent_dp", "torchft": "torchft", "torchft-diloco": "torchft"}
"""Rivals' packages, by their names in Python."""
PLAIN = "plain"
"""torch's optimizer, not wrapped: for one rank."""
MUTANT = "drops_late"
"""A variant of ``solo`` that loses late gradients."""
IN_BACKWARD = ("ddp", "decent-dp")
"""They wait for others in the backward pass."""
REDUCTIONS = {"horovod": ("fp16",), "ddp": ("fp16", "bf16", "powersgd")} | dict.fromkeys((*LOCAL_RIVALS, *LEADERS), ())
"""Compressions of arms that send gradients: Horovod has fp16 only, DDP's hooks also PowerSGD."""
REDUCED = ("fp16", "bf16")
"""Compressions of partial allreduce."""
VARIANTS: dict[str, dict[str, Any]] = {
    "confirm": {"environment": {"HVD_ASYNC_CONFIRM": "1"}},
    "check": {"environment": {"HVD_ASYNC_CHECK": "1"}},
    "disagree": {"environment": {"HVD_ASYNC_AGREE": "0"}},
    "item": {"reads_loss": True},
    **{f"lead={ms}": {"own": {"arrival_lead": ms / 1e3}} for ms in (0, 4, 8, 12)},
}
"""Variants of an arm, such as ``all:confirm``, and what their blocks have: rounds are applied once they are complete;
lost changes are looked for in every step; no agreement at the first bucket; the script reads its loss in every step;
buckets arrive that number of milliseconds before they are computed."""
WARM_UP = 3
"""Untimed steps at the start of a block: ranks meet, DDP orders its buckets, Horovod fills its cache."""


def is_eager(arm: str) -> bool:
    """Return whether an arm is hvd_async's partial allreduce, with a quorum."""
    return read_name(arm).base not in (*RIVALS, PLAIN, *LEADERS, *GOSSIP)


def has_own_weights(arm: str) -> bool:
    """Return whether under an arm each rank has weights of its own, whose mean is the consensus."""
    base = read_name(arm).base
    return base in LOCAL_RIVALS or base in LEADERS or base in GOSSIP


def listed(text: str) -> list[str]:
    """Return the names of a command line's list, each once."""
    return list(dict.fromkeys(arm.strip() for arm in text.split(",") if arm.strip()))


def variant_of(arm: str) -> tuple[str, dict[str, Any]]:
    """Return an arm without its variant, and what blocks of the variant have.

    Raises:
        ValueError: there is no such variant.
    """
    base, colon, variant = arm.partition(":")
    if colon and variant not in VARIANTS:
        raise ValueError(f"the arm {arm!r} is not there: variants are {', '.join(VARIANTS)}")
    return base, VARIANTS[variant] if colon else {}


def need_arm(baseline: str, arms: Sequence[str]) -> None:
    """Check that the arm which others are compared with is one of these; ValueError if not."""
    if baseline not in arms:
        raise ValueError(f"--arms: the case needs the arm {baseline!r}, to which the others are compared")


def parse_arms(
    text: str,
    ranks: int,
    rivals: Sequence[str] = ("horovod", "ddp"),
    gossip: bool = False,
    leaders: bool = False,
    compressed: bool = False,
    local_size: int = 1,
) -> list[str]:
    """Return the arms of a command line's list, each once.

    Args:
        text: names with commas between them.
        ranks: of the job.
        rivals: rivals of the case.
        gossip: whether it has arms that gossip.
        leaders: whether it has arms that follow a leader, or a center.
        compressed: whether it has arms whose gradients are compressed.
        local_size: ranks of a host, of which arms ``-hosts`` make one.

    Raises:
        ValueError: an arm that cannot be with this number of ranks, or in this case.
    """
    arms = listed(text)
    if not arms:
        raise ValueError(f"no arm was named: take {', '.join(ARMS)}, k3 for three ranks, or a fraction")
    for arm in arms:
        how, (base, compression, every, hosts, quasi_global) = gossip_of(arm), read_name(arm)
        if hosts and (local_size == 1 or base in (*RIVALS, *LEADERS, "local-sgd")):
            raise ValueError(f"the arm {arm!r} is not there: -hosts is for partial allreduce and gossip, --per-host 2")
        if (base in RIVALS and base not in rivals) or (how and not gossip) or (base in LEADERS and not leaders):
            raise ValueError(f"the arm {arm!r} is not there in this case")
        if base == "decent-dp" and not (ranks > 1 and ranks.bit_count() == 1):
            raise ValueError(f"{ranks} ranks: the arm {arm} wants 2, 4, 8, ...: in its graph ranks pair off in turn")
        if not installed([base]):
            raise ValueError(f"the arm {arm} needs its package: pip install {PACKAGES[base].replace('_', '-')}")
        if how:
            make_plan(ranks, **how._asdict(), local_size=local_size if hosts else 1)
        elif every or quasi_global:
            raise ValueError(f"the arm {arm!r} is not there: -avg4 or -qg is for gossip")
        elif compression != "none" and not (compressed and compression in REDUCTIONS.get(base, REDUCED)):
            raise ValueError(f"the arm {arm!r} is not there in this case: {base} is not compressed so")
        if base not in rivals and is_eager(arm):
            quorum = quorum_of(base)
            if isinstance(quorum, int) and quorum > ranks:
                raise ValueError(f"the arm {arm!r} wants {quorum} of {ranks} ranks")
    return arms


def installed(arms: Sequence[str]) -> list[str]:
    """Return the arms whose package is there, if they need one."""
    return [arm for arm in arms if arm not in PACKAGES or importlib.util.find_spec(PACKAGES[arm])]
