"""Words of the warning: which ranks others wait for, and what would spare them that, in the mode in use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_async.algorithms.eager.quorum import needed
from hvd_async.algorithms.registry import ALGORITHMS


def named(places: Sequence[int], ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks at these places with their hosts: "rank 5 on host n3 and rank 7 on host n4"."""
    by_host: dict[str, list[str]] = {}
    for place in sorted(places):
        by_host.setdefault(hosts[place], []).append(str(ranks[place]))
    return " and ".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(some)} on host {host}" for host, some in by_host.items()
    )


def waiting(share: float, step_s: float, whose: str) -> str:
    """Return how much the others wait.

    Args:
        share: of their time.
        step_s: seconds of a step, as they are.
        whose: the ranks that are waited for, in words.
    """
    return f"the other ranks wait {share:.0%} of their time, {1e3 * share * step_s:.3g} ms a step, for {whose}"


def advice(settings: Mapping[str, Any], size: int, slow: int) -> str:
    """Return what would spare the other ranks these waits; "" where nothing of this library's would.

    Args:
        settings: of the optimizer.
        size: how many ranks share it.
        slow: how many of them are slow.
    """
    match ALGORITHMS[settings["algorithm"]].waits_for:
        case "quorum":
            return _of_rounds(settings, size, slow)
        case "neighbours" | "period" | "all":
            return (
                'GossipOptimizer(algorithm="adpsgd") waits for nobody, but after max_local_steps without an averaging '
                "(it loses accuracy where ranks see different classes)"
            )
        case "nobody" if settings.get("max_local_steps"):
            return f"a higher max_local_steps (now {settings['max_local_steps']}) would make such waits rarer"
    return ""


def _of_rounds(settings: Mapping[str, Any], size: int, slow: int) -> str:
    """Return it for partial allreduce."""
    quorum, by_host = settings["quorum"], settings.get("local_size", 1) > 1
    parties = size // settings.get("local_size", 1)
    without = _starts_without(quorum, parties, slow)
    if settings["pace"] == "rounds":
        late = f"a higher max_staleness (now {settings['max_staleness']}) would have rounds wait for it later"
        return late if without else 'quorum="solo" would let rounds start without it'
    whom = "the other hosts" if by_host else "the others"
    changes = [] if without and settings["max_staleness"] else ['quorum="solo"']
    changes += ['pace="rounds"', *(["max_staleness=16"] if not settings["max_staleness"] else [])]
    return f"{', '.join(changes)} would let it give fewer gradients in place of holding up {whom}"


def _starts_without(quorum: Any, parties: int, slow: int) -> bool:
    """Whether rounds start without the slow ranks, once these need not do as many steps as the others."""
    if isinstance(quorum, str):
        return quorum in ("solo", "auto")
    return needed(quorum, parties) <= parties - slow
