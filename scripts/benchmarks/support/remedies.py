"""Remedies for late gradients, and trainings to try them on. Pure.

Times are those of ``schedule.play``: communication is free, a step takes as long as it computes. A round's gradient is
the mean of what has arrived, over all ranks. T is the number of rounds to look ahead (``weight_prediction``,
docs/eager.md), s the number of rounds that a gradient is late.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hvd_async.simulation.schedule import Schedule, one_random

from .data import longest_of
from .figures import Block

JITTER = 0.03
"""Largest share of a step's computation by which ranks differ without delays: they never arrive all at once."""
CLIPS = {"median": 20, "batch": 8, "bucketed": True}
"""Clips as ``sequence_lengths`` has them by default."""


class Remedy(NamedTuple):
    """A way to go about late gradients.

    Attributes:
        quorum: an arm of partial allreduce.
        ahead: T of extrapolated updates; 0: none.
        predicted: T of weight prediction as in version 0.2.0: the model holds predicted weights while gradients are
            computed, and each round starts from the weights that the rounds before have led to; 0: none.
        power: gradients have weights (1 + s)^-power, and these are divided by the mean of their rank's; 0: all have 1.
        bare: weights are not divided by their mean.
        compensation: lambda of delay compensation, g + lambda g g (w - w_then), w_then where it was computed (Zheng et
            al., ICML 2017, equation 10); 0: none.
        momentum: of the optimizer, None is the training's own; the learning rate goes with it, so that their
            lr / (1 - momentum) is the same (asynchrony is momentum: Mitliagkas et al., Allerton 2016).
        catch_up: a gradient that is s rounds late moves the weights as far as though it had come in time, and is in
            the momentum what would be left of it (spike compensation: Kosson et al., MLSys 2021, by each one's own s).
        fresh: gradients are those at the weights that they are applied to: no job can have them at this speed.
    """

    quorum: str = "solo"
    ahead: float = 0.0
    predicted: float = 0.0
    power: float = 0.0
    bare: bool = False
    compensation: float = 0.0
    momentum: float | None = None
    catch_up: bool = False
    fresh: bool = False


REMEDIES = {
    "synchronous": Remedy("all"),
    "none": Remedy(),
    **{f"extrapolate-{ahead}": Remedy(ahead=ahead) for ahead in (1, 2, 3)},
    "predict-2": Remedy(predicted=2),
    "weights": Remedy(ahead=2, power=1.0),
    "weights-half": Remedy(ahead=2, power=0.5),
    "weights-bare": Remedy(ahead=2, power=1.0, bare=True),
    "compensated": Remedy(compensation=16.0),
    "extrapolate-2-compensated": Remedy(ahead=2, compensation=16.0),
    "momentum-0.8": Remedy(momentum=0.8),
    "catch-up": Remedy(catch_up=True),
    "half-quorum": Remedy("0.5", ahead=2),
    "fresh": Remedy(fresh=True),
}
"""By arm."""
BASELINE, DEFAULT = "synchronous", "extrapolate-2"


class Task(NamedTuple):
    """A training.

    Attributes:
        data: "digits", on which a small ResNet is trained, or "clips", an LSTM.
        ranks, steps: steps are those of each rank.
        late: what one random rank computes longer in each step, over a step's computation.
        optimizer: "sgd", "adam", "adamw" or "muon" (AdamW for parameters that are vectors).
        rate: the highest learning rate.
    """

    data: str
    ranks: int
    steps: int
    late: float = 0.0
    optimizer: str = "sgd"
    rate: float = 0.1


OTHERS = ("adam", "adamw", "muon")
TASKS = {
    "digits": Task("digits", 4, 176),
    "digits-late": Task("digits", 4, 176, late=1.0),
    "clips4": Task("clips", 4, 480, rate=0.05),
    "clips8": Task("clips", 8, 240, rate=0.05),
    **{f"digits-late-{name}": Task("digits", 4, 176, 1.0, name, 0.01) for name in OTHERS},
    **{f"clips8-{name}": Task("clips", 8, 240, 0.0, name, 0.01) for name in OTHERS},
}
"""By name: a whole training of a small ResNet, that of ``sequence_lengths``, and both with other optimizers."""


def times_of(block: Block) -> Schedule:
    """Return the seconds of each rank in each step: by the longest of its clips, or equal except for jitter."""
    steps, ranks, seed = (block[key] for key in ("steps", "ranks", "seed"))
    if block["data"] == "clips":
        return longest_of(clips_task(block), ranks)
    jitter = JITTER * np.random.default_rng([seed, 1]).random((steps, ranks))
    return one_random(steps, ranks, 1.0, block["late"], seed) + jitter


def clips_task(block: Block) -> dict[str, Any]:
    """Return the clips that a training is on."""
    return {"name": "clips", "seed": block["seed"], "steps": block["steps"], **CLIPS}
