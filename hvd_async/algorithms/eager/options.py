"""Partial allreduce, as data: its options with defaults."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_async.runtime.family import Algorithm

ALGORITHMS: Mapping[str, Algorithm] = {
    "eager": Algorithm(
        "eager",
        "eager",
        {"quorum": "solo", "max_staleness": 16, "grace": 0.0, "pace": "steps"},
        sends="gradients",
        waits_for="quorum",
    ),
}
"""By name."""
