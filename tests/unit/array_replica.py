"""A replica of two weights in a NumPy array, for drivers without a framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_async.optimizers.agreement import Buffer, Buffers
from hvd_async.optimizers.methods import GossipMethods
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.process_sets import RankGroup


class Statistic(Buffer):
    """The statistic of ``Weights``."""

    name = key = kind = "statistic"
    is_statistic = True

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def data(self) -> Any:
        return self.values().view(np.uint8)

    def put_data(self, data: Any) -> None:
        self.put_values(data.view(np.float64))

    def values(self) -> Any:
        return np.array([self._weights.statistic])

    def put_values(self, values: Any) -> None:
        self._weights.statistic = float(values[0])


class Weights(WeightReplica):
    """Two weights in an array, and one statistic."""

    def __init__(self) -> None:
        self.weights, self.statistic = np.array([1.0, 2.0]), 5.0

    def prepare(self) -> None: ...

    def read(self) -> Any:
        return self.weights.copy()

    def write(self, weights: Any) -> None:
        self.weights = weights

    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        return ["two weights"], [0]

    def message_format(self, compression: str, rows: int, rank_group: RankGroup, parts: int, received: int) -> Any:
        pytest.fail("no worker of these tests sends weights")

    def is_finite(self, weights: Any) -> bool:
        return bool(np.isfinite(weights).all())

    def describe_nonfinite(self, step: str = "this rank's step has") -> str:
        return f"{step} made weights not finite"

    def read_double(self) -> Any:
        return self.weights.copy()

    def buffers(self) -> Buffers:
        return Buffers([Statistic(self)], lambda array: array)

    def check_momentum(self) -> None: ...

    def momentum(self) -> Any:
        return np.zeros(2)

    def write_momentum(self, momentum: Any) -> None: ...


class Optimizer(GossipMethods):
    """A wrapped one."""
