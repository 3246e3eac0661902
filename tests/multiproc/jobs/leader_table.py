"""The cases of the leader jobs, as data: what the ranks run, and what the tests compare it with. No framework here."""

from __future__ import annotations

import dataclasses

from tests.conformance.leader_reference import NEVER_OLD, Following, several

STEPS = 24
ASLEEP, PULLS = 48, 1
"""Steps that the others take while a rank sleeps."""


def cases(size: int) -> dict[str, Following]:
    """By name."""
    one = Following(groups=several(size, size), local_period=2, global_period=4, loss_window=NEVER_OLD)
    found = {"one group": one, "easgd": Following("easgd", global_period=2), "alone": one}
    found["alone"] = dataclasses.replace(one, groups=several(size, 1), lr_spread="linear")
    if size > 2 and size % 2 == 0:
        found["pairs"] = dataclasses.replace(one, groups=several(size, 2), local_pull=0.3, global_prox=0.0)
    return found
