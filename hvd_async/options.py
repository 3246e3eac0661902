"""Checks of the wrappers' arguments that both bindings share."""

from __future__ import annotations

from typing import Any

from hvd_async.activation import Quorum, check_quorum

BUFFERS = ("average", "local", "root")


def check_eager_options(quorum: Quorum, max_staleness: int, grace: float, buffers: str, size: int) -> None:
    """Refuse what no eager optimizer at ``size`` ranks can have.

    Raises:
        ValueError: with a hint.
    """
    check_quorum(quorum, size)
    if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0:
        raise ValueError(
            f"max_staleness={max_staleness!r} is not a number of rounds: take 0 (synchronous) or more, 16 is usual"
        )
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < float("inf"):
        raise ValueError(f"grace={grace!r} is not a number of seconds: take 0.0 or more")
    if buffers not in BUFFERS:
        raise ValueError(f"buffers={buffers!r} is not known: take one of {', '.join(map(repr, BUFFERS))}")


def refuse(**given: tuple[Any, Any]) -> None:
    """Refuse Horovod's parameters that this version does not serve, rather than ignore them.

    Args:
        given: name=(value, the only value that is served).

    Raises:
        ValueError: one differs.
    """
    for name, (value, only) in given.items():
        if value is not only and value != only:
            raise ValueError(f"{name}={value!r} is not supported by this version of EagerOptimizer: leave it out")
