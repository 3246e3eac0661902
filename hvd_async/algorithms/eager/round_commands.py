"""Commands that start rounds: as few as can be, each as short as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hvd_async.algorithms.eager.messages import HostSteps, SetHyperparameters, StartRound
from hvd_async.runtime.messages import Hyper


class Started(NamedTuple):
    """A bucket's round that has started; as of ``StartRound``."""

    bucket: int
    round: int
    by: int
    arrived: int
    held: float
    hyper: Hyper | None
    """The round's hyperparameters, with its last bucket; None if they are not known."""
    whole: HostSteps | None


class RoundCommands:
    """One optimizer's; knows which hyperparameters its ranks were sent last, so that they are not sent again."""

    def __init__(self, optimizer: int) -> None:
        self._optimizer = optimizer
        self._sent: Hyper | None = None

    def starts(self, started: Sequence[Started]) -> list[StartRound]:
        """Return the commands of rounds that have started by one event: one for all buckets that can be told alike."""
        commands: list[StartRound] = []
        for (number, by, whole), alike in itertools.groupby(started, lambda one: (one.round, one.by, one.whole)):
            same = list(alike)
            buckets, arrived = [one.bucket for one in same], [one.arrived for one in same]
            hyper = next((one.hyper for one in same if one.hyper is not None), None)
            settled, held = hyper is not None, sum(one.held for one in same)
            sent = None if hyper is None else self._news(hyper)
            commands.append(StartRound(self._optimizer, buckets, number, by, arrived, held, settled, sent, whole))
        return commands

    def hyper(self, number: int, hyper: Hyper) -> SetHyperparameters:
        """Return the command for hyperparameters that were not known when a round started."""
        return SetHyperparameters(self._optimizer, number, self._news(hyper))

    def _news(self, hyper: Hyper) -> Hyper | None:
        """Return hyperparameters as ranks are told them: None if they are those that were sent last."""
        if hyper == self._sent:
            return None
        self._sent = hyper
        return hyper
