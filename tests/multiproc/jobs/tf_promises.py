"""The promises of docs/promises.md in TensorFlow: ``fit()`` with stragglers, conservation, uneven batches."""

from __future__ import annotations

from typing import Any

import keras
from common import Report, Straggler
from promises import counts, run
from table import BOUNDED, FEW_PROMISES, Promise
from tf_common import Whole, batches, compiled, crc, mlp

import hvd_async.tensorflow.keras as hvd

STEPS = 12


class Observer(keras.callbacks.Callback):
    """Sleeps before every batch, lowers this rank's own learning rate, and looks at the replica after every batch."""

    def __init__(self, straggler: Straggler) -> None:
        super().__init__()
        self._straggler = straggler
        self.history: list[tuple[int, int]] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._straggler.compute()
        self.model.optimizer.learning_rate.assign(0.1 * 0.9**batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        self.history.append((optimizer.stats().rounds, crc([*self.model.variables, *state(optimizer)])))


def state(optimizer: Any) -> list[Any]:
    """The optimizer's variables, but for the learning rate, which is each rank's own between rounds."""
    return [v for v in optimizer.variables if v is not optimizer.learning_rate]


def promise(report: Report, case: Promise) -> None:
    """Momentum, decay and a rate that follows every rank's own count, in ``fit()`` with stragglers."""
    rank, size = hvd.rank(), hvd.size()
    model = mlp(seed=1)
    optimizer = hvd.EagerOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-3), quorum=case.quorum, max_staleness=case.max_staleness
    )
    observer = Observer(Straggler(case.inject, rank, size, seed=3))
    compiled(model, optimizer).fit(batches(rank, STEPS), verbose=0, shuffle=False, callbacks=[observer])
    optimizer.drain()
    report.put(
        case.name,
        history=observer.history,
        weights=crc(model.variables),
        state=crc(state(optimizer)),
        **counts(optimizer),
    )


class KerasWhole(Whole):
    """Whole-number training, without a graph."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.optimizer = hvd.EagerOptimizer(self.sgd(), **options)

    def step(self, rank: int, step: int) -> None:
        """A step with that rank's gradient."""
        self.optimizer.apply(self.gradients(rank, step), self.variables)


if __name__ == "__main__":
    run(hvd, promise, KerasWhole, (FEW_PROMISES + BOUNDED, FEW_PROMISES), 10)
