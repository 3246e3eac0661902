"""DESIGN.md section 3 on real ranks, in TensorFlow: ``fit()`` with stragglers, conservation, uneven batches."""

from __future__ import annotations

from typing import Any

import keras
from common import Report, Straggler, arguments, staleness, whole_expected
from table import BOUNDED, FEW_PROMISES, QUORUMS, Promise, Quorum, conservation, uneven, uneven_steps
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
    stats = optimizer.stats()
    report.put(
        case.name,
        history=observer.history,
        weights=crc(model.variables),
        state=crc(state(optimizer)),
        distance=optimizer.consensus_distance(),
        produced=stats.gradients_produced,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
    )


def train_whole(optimizer: Any, whole: Whole, straggler: Straggler, first: int, steps: int) -> None:
    """Steps ``first`` + 1 to ``first`` + ``steps`` with whole-number gradients, without a graph."""
    for step in range(first + 1, first + steps + 1):
        straggler.compute()
        optimizer.apply(whole.gradients(hvd.rank(), step), whole.variables)


def conserve(report: Report, quorum: Quorum) -> None:
    """Whole-number gradients with stragglers."""
    whole = Whole()
    optimizer = hvd.EagerOptimizer(whole.sgd(), quorum=quorum, max_staleness=5)
    train_whole(optimizer, whole, Straggler("random:1:0.02", hvd.rank(), hvd.size(), seed=5), 0, 10)
    optimizer.drain()
    report.put(
        conservation(quorum),
        weights=whole.weights(),
        expected=whole_expected([10] * hvd.size()),
        late=sum(n for s, n in optimizer.stats().staleness.items() if s > 0),
    )


def run_uneven(report: Report, quorum: Quorum) -> None:
    """Every phase ends in a drain; in each there is a rank without any step."""
    whole, size = Whole(), hvd.size()
    optimizer = hvd.EagerOptimizer(whole.sgd(), quorum=quorum, max_staleness=4)
    straggler = Straggler("random:1:0.01", hvd.rank(), size, seed=7)
    done = [0] * size
    phases = []
    for phase in range(3):
        steps = [uneven_steps(phase, rank, size) for rank in range(size)]
        train_whole(optimizer, whole, straggler, done[hvd.rank()], steps[hvd.rank()])
        optimizer.drain()
        done = [a + b for a, b in zip(done, steps, strict=True)]
        phases.append({"weights": whole.weights(), "expected": whole_expected(done)})
    stats = optimizer.stats()
    report.put(
        uneven(quorum),
        phases=phases,
        own=stats.steps,
        steps=done,
        applied=stats.gradients_applied,
        total=stats.total_produced,
        staleness=staleness(stats),
    )


def main() -> None:
    few = arguments().cases == "few"
    hvd.init()
    report = Report(hvd.rank())
    for case in FEW_PROMISES if few else FEW_PROMISES + BOUNDED:
        promise(report, case)
    for quorum in QUORUMS:
        conserve(report, quorum)
        if not few:
            run_uneven(report, quorum)
    hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
