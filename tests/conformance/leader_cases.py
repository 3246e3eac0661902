"""Cases of following a leader for both bindings: groups and strengths. Framework-free."""

from __future__ import annotations

import dataclasses

from tests.conformance.leader_reference import NEVER_OLD, Following, drawn, several

PAIRS = Following("lsgd", several(4, 2), 2, 4, loss_window=NEVER_OLD)
ELASTIC = Following("easgd", global_period=3)

SCHEDULES: dict[str, Following] = {
    name: Following(groups=((0, 2), (1, 3)), local_period=2, global_period=7, loss_window=NEVER_OLD, **strengths)
    for name, strengths in {
        "no-pull": {"local_pull": 0.0, "global_pull": 0.0},
        "no-prox": {"local_prox": 0, "global_prox": 0},
        "only-local": {"global_pull": 0.0, "global_prox": 0.0, "local_pull": 0.5, "local_prox": 0.7},
        "only-global": {"local_pull": 0.0, "local_prox": 0.0, "global_pull": 0.9, "global_prox": 0.99},
        "by-step": {
            "local_pull": lambda step: 0.5 / step,
            "global_pull": lambda step: 0.4 * (step % 3 == 1),
            "local_prox": lambda step: min(0.9, 0.01 * step),
            "global_prox": lambda step: 0.9 if step > 15 else 0,
        },
    }.items()
} | {
    "no-alpha": dataclasses.replace(ELASTIC, alpha=0.0, beta=0.5),
    "no-beta": dataclasses.replace(ELASTIC, alpha=0.7, beta=0.0),
}
"""Jobs of four ranks, by name."""


def leads(rank: int, of: Following = PAIRS) -> Following:
    """The same, with a rank whose losses are lower than all others'."""
    return dataclasses.replace(of, loss_of=lambda z, own, step: drawn(z, own, step) - 2.0 * (own == rank))
