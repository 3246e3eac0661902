"""The leader-pull algorithms, as data: their options with defaults, and what sets them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvd_async.runtime.family import Algorithm


@dataclass(frozen=True)
class LeaderAlgorithm(Algorithm):
    """One algorithm of the family.

    Attributes:
        has_center: whether ranks are pulled towards a center variable and no rank leads: no losses are needed then,
            and groups are never pulled by themselves.
    """

    has_center: bool = False


ALGORITHMS: Mapping[str, LeaderAlgorithm] = {
    "lsgd": LeaderAlgorithm(
        name="lsgd",
        family="leader",
        options={
            "local_period": None,
            "global_period": 16,
            "local_pull": 0.1,
            "global_pull": 0.1,
            "local_prox": 0.1,
            "global_prox": 0.1,
            "group": "host",
            "loss_window": 10,
        },
        sends="weights",
        waits_for="nobody",
    ),
    "easgd": LeaderAlgorithm(
        name="easgd",
        family="leader",
        options={"global_period": 16, "alpha": None, "beta": 0.43},
        sends="weights",
        waits_for="nobody",
        has_center=True,
    ),
}
"""By name. ``local_period`` None is a quarter of ``global_period``, ``alpha`` None is ``beta`` / P."""
