"""Kinds of imbalance, and what is trained under each by ``time_to_accuracy``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_async.simulation.names import SYNCHRONOUS, read_name, waits_for_nobody
from hvd_async.simulation.schedule import Schedule, one_random, own_pace

from .arms import eager
from .clips import TRAIN, dealt_to, lengths_of
from .data_sets import parted


@dataclass(frozen=True)
class Kind:
    """A kind of imbalance, with a training that is short enough for many of them.

    Attributes:
        text: in words.
        data: "digits", "gratings" or "clips".
        model: "resnet", "plain" (two layers), "wide" (two layers, for a slow network) or "lstm".
        steps: that ranks take, those apart that go at their own pace: these take as many together.
        batch: samples a rank and step.
        compute: seconds slept in a step beside the work; of clips, for each frame of the batch's longest.
        lr: the middle of the rates that are tried.
        late: seconds that a rank sleeps more.
        who: of them: "nobody", "any" (one rank, drawn in each step) or "last".
        split: "even", or "classes": each rank sees classes that others do not.
        mbit: of each rank's link; None: all are on one machine.
        paced: whether quorums have ``pace="rounds"``, as is documented for a rank that is slow for good.
    """

    text: str
    data: str
    model: str
    steps: int
    batch: int
    compute: float
    lr: float
    late: float = 0.0
    who: str = "nobody"
    split: str = "even"
    mbit: float | None = None
    paced: bool = False

    def times(self, asked: dict[str, Any], ranks: int) -> Schedule:
        """Seconds that each rank sleeps in each step, the same of all arms with the same seed."""
        steps = asked["steps"]
        if self.data == "clips":
            lengths = clip_lengths(asked)
            return self.compute * lengths[dealt_to(asked, lengths, ranks)].max(axis=2)
        if self.who == "any":
            return one_random(steps, ranks, self.compute, self.late, asked["seed"])
        times = np.full((steps, ranks), self.compute)
        times[:, -1] += self.late if self.who == "last" else 0.0
        return times


KINDS = {
    "none": Kind("nobody is late", "gratings", "wide", 110, 16, 0.006, 0.06),
    "stragglers": Kind("one random rank late", "gratings", "resnet", 160, 16, 0.006, 0.15, 0.012, "any"),
    "slow-rank": Kind("one rank 3 times slower", "digits", "resnet", 120, 16, 0.008, 0.1, 0.016, "last", paced=True),
    "lengths": Kind("sequences differ in length", "clips", "lstm", 140, 8, 0.002, 0.1),
    "network": Kind("links of 50 Mbit/s", "gratings", "wide", 110, 16, 0.01, 0.06, mbit=50.0),
    "classes": Kind("classes split over ranks", "digits", "plain", 150, 16, 0.006, 0.125, 0.006, "last", "classes"),
}
"""By the name that the command line has for each."""
CLIP_FRAMES = 8
"""Frames of a clip, median."""


def clip_lengths(asked: dict[str, Any]) -> Any:
    """Frames of the clips that a training is on."""
    lengths = lengths_of(asked["seed"], asked["median"])
    return lengths[parted(np.arange(TRAIN), np.arange(0), asked["tuning"])[0]]


def pace_of(kind: Kind, arm: str) -> str | None:
    """The ``pace=`` of an arm that is a quorum; None of others."""
    if not eager(arm):
        return None
    return "rounds" if kind.paced and read_name(arm).base not in SYNCHRONOUS else "steps"


def block_of(kind: str, arm: str, seed: int, lr: float, steps: int, ranks: int, tuning: bool) -> dict[str, Any]:
    """One training, as ``jobs/time_to_accuracy.py`` reads it.

    Where each rank goes at its own pace, all train for the same time, with as many steps together as in other arms.
    """
    how = KINDS[kind]
    asked: dict[str, Any] = {"kind": kind, "arm": arm, "seed": seed, "lr": lr, "tuning": tuning, "steps": steps}
    asked |= {"data": how.data, "model": how.model, "split": how.split, "batch": how.batch}
    if how.data == "clips":
        asked |= {"bucketed": True, "median": CLIP_FRAMES}
    times, pace = how.times(asked, ranks), pace_of(how, arm)
    own = waits_for_nobody(arm) or pace == "rounds"
    asked |= {"own_steps": own_pace(times) if own else [steps] * ranks, "pace": pace}
    return asked | {"times": np.round(times, 5).tolist()}
