"""Cases of following a leader for both bindings: groups, strengths, ends, refusals. Framework-free."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

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
    return dataclasses.replace(of, told=lambda z, own, step: drawn(z, own, step) - 2.0 * (own == rank))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "sgp"}, r"algorithm='sgp' is not known: take one of 'lsgd', 'easgd'"),
    ({"lr_spread": "square"}, r"lr_spread='square' is not known: take one of 'none', 'linear', 'power'"),
    # periods
    ({"global_period": 0}, r"global_period=0: take 1 or more"),
    ({"local_period": 0}, r"local_period=0: take 1 or more"),
    ({"local_period": -3}, r"local_period=-3: take 1 or more"),
    ({"global_period": 2.5}, r"global_period=2.5: take 1 or more"),
    ({"global_period": True}, r"global_period=True: take 1 or more"),
    ({"local_period": 5, "global_period": 4}, r"local_period=5 is above global_period=4: groups follow their own"),
    ({"local_period": 17}, r"local_period=17 is above global_period=16"),
    ({"loss_window": 0}, r"loss_window=0: take 1 or more"),
    ({"algorithm": "easgd", "global_period": 0}, r"global_period=0: take 1 or more"),
    # strengths
    ({"local_pull": 1.0}, r"local_pull: a strength of 1.0 .*take 0 \(no pull\) or more, and less than 1"),
    ({"global_pull": -0.1}, r"global_pull: a strength of -0.1"),
    ({"local_prox": math.nan}, r"local_prox: a strength of nan"),
    ({"global_prox": "0.1"}, r"global_prox: a strength of '0.1'"),
    ({"global_pull": True}, r"global_pull: a strength of True"),
    ({"local_pull": lambda step: 1.5 * step}, r"local_pull: a strength of 1.5 at step 1"),
    ({"algorithm": "easgd", "alpha": 1.0}, r"alpha: a strength of 1.0"),
    ({"algorithm": "easgd", "beta": 1.5}, r"beta: a strength of 1.5"),
    ({"algorithm": "easgd", "beta": "0.4"}, r"beta: a strength of '0.4'"),
    ({"algorithm": "easgd", "alpha": lambda step: 0.1}, r"alpha=.* all ranks must move the centre alike"),
    ({"algorithm": "easgd", "beta": lambda step: 0.1}, r"beta=.* all ranks must move the centre alike"),
    # options of the other algorithm
    ({"alpha": 0.1}, r"alpha: lsgd has no use for it; leave it out, or take another algorithm"),
    ({"beta": 0.43, "alpha": 0.0}, r"alpha, beta: lsgd has no use for it"),
    ({"algorithm": "easgd", "local_period": 2}, r"local_period: easgd has no use for it"),
    ({"algorithm": "easgd", "global_pull": 0.0}, r"global_pull: easgd has no use for it"),
    ({"algorithm": "easgd", "group": 2}, r"group: easgd has no use for it"),
    ({"algorithm": "easgd", "loss_window": 3}, r"loss_window: easgd has no use for it"),
    # groups
    ({"group": 3}, r"group=3: groups of 3 do not divide 4 ranks; take a divisor of 4"),
    ({"group": 0}, r"group=0: groups of 0 do not divide 4 ranks"),
    ({"group": [[0, 1], [1, 2, 3]]}, r"every one of the ranks \[0, 1, 2, 3\] must be in one group, no group empty"),
    ({"group": [0, 1, 2, 3]}, r"must be in one group"),
    ({"group": "node"}, r"group='node' is none: take 'host', ranks per group, or a list of groups of ranks"),
    # Horovod's
    ({"compression": object()}, r"compression: a leader's weights travel as they are; leave it out"),
    ({"gradient_predivide_factor": 2.0}, r"gradients stay on their rank .*leave it out"),
    ({"num_groups": 2}, r"groups, num_groups: a rank's weights travel as one message .*leave them out"),
    ({"groups": [[]]}, r"leave them out"),
    ({"backward_passes_per_step": 0}, r"not a number of backward passes: take 1 or more"),
    ({"process_set": object()}, r"pass an hvd\.ProcessSet"),
    ({"buffers": "root"}, r"buffers='root': no rank is the root of others here; take 'average' or 'local'"),
    ({"buffers": "mean"}, r"buffers='mean' is not known"),
]
"""Arguments that four ranks in groups of two refuse, and with which hint."""
DEFAULT = [
    ({}, ("lsgd", [[0, 1], [2, 3]], 4, 16)),
    ({"global_period": 3}, ("lsgd", [[0, 1], [2, 3]], 1, 3)),
    ({"global_period": 40, "local_period": 2}, ("lsgd", [[0, 1], [2, 3]], 2, 40)),
    ({"algorithm": "easgd"}, ("easgd", [[0, 1, 2, 3]], 16, 16)),
]
"""Of two hosts of two ranks: arguments, and (algorithm, groups, periods) that they mean."""
