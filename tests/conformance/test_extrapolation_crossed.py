"""Extrapolated updates beside what else an EagerOptimizer does: ranks that have seen the same rounds hold the same
bits, and those are the float64 reference's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_async.testing import Cluster
from tests.conformance.cases import Case, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine, tapes
from tests.conformance.eager_ranks import ADAM, KERAS, MOMENTUM, TORCH, Binding, both
from tests.conformance.reference import Array, replay
from tests.conformance.torch_ranks import ProcessSet

__all__ = ["tapes"]  # a fixture

RANKS, STEPS, SIZE, SLOW = 4, 5, 6, 1
NESTEROV = Case("nesterov-decay", "sgd", 0.05, momentum=0.8, nesterov=True, weight_decay=0.05)


class End(NamedTuple):
    """A rank's weights after each of its steps, by the rounds that they had seen; after the end; those rounds."""

    seen: dict[int, Array]
    after: Array
    rounds: int


def gradient(rank: int, step: int) -> Array:
    return np.random.default_rng([rank, step]).normal(size=SIZE)


def take(one: Any, rank: int, step: int) -> None:
    """A step."""
    one.take(gradient(rank, step))


def take_two(one: Any, rank: int, step: int) -> None:
    """A step of two passes."""
    one.take_passes([[gradient(rank, step)], [gradient(rank, step + STEPS)]])


def take_at_a_rate(one: Any, rank: int, step: int) -> None:
    """A step at a learning rate of this rank's own."""
    one.set_rate(0.02 * (1 + rank + step))
    take(one, rank, step)


def train(
    binding: Binding, case: Case, options: Callable[[int], dict[str, Any]], step: Callable[[Any, int, int], None]
) -> list[End]:
    """Train on a cluster whose messages are held up at random. A rank begins when all others are through; of ranks that
    step with their host, none can."""
    taken = [threading.Event() for _ in range(RANKS)]

    def work(rank: int) -> End:
        one = binding.vectors([SIZE], case, weight_prediction=2, **options(rank))
        one.opt._async.worker_now()
        seen = {}
        for other, event in enumerate(taken):
            assert rank != SLOW or other == SLOW or "hierarchical" in options(rank) or event.wait(60)
        for number in range(STEPS):
            step(one, rank, number)
            seen[one.opt.rounds] = one.weights()
        taken[rank].set()
        one.opt.drain()
        return End(seen, one.weights(), one.opt.rounds)

    return Cluster(RANKS, jitter=0.002).run(work)


def check(binding: Binding, case: Case, ends: list[End], tapes: Any, members: Callable[[int], Any]) -> None:
    """Replicas are the reference's, between rounds too."""
    for rank, end in enumerate(ends):
        ranks, applied, zeros = members(rank), tapes[rank].applied, np.zeros(SIZE)
        for other in ranks:
            for rounds in end.seen.keys() & ends[other].seen.keys():
                assert end.seen[rounds].tobytes() == ends[other].seen[rounds].tobytes(), f"replicas after {rounds}"
            assert end.after.tobytes() == ends[other].after.tobytes()
        for rounds, weights in [*end.seen.items(), (end.rounds, end.after)]:
            ahead = 2 if len(ranks) > 1 else 0
            expected = replay(binding.framework, case, zeros, applied[:rounds], len(ranks), ahead)
            np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "step", "options"),
    [
        (MOMENTUM, take, {}),
        (NESTEROV, take, {}),
        (ADAM, take, {}),
        (MOMENTUM, take_at_a_rate, {}),
        (MOMENTUM, take_two, {"backward_passes_per_step": 2}),
        (MOMENTUM, take, {"quorum": 2, "max_staleness": 8, "grace": 0.01}),
        (MOMENTUM, take, {"hierarchical": 2}),
        (MOMENTUM, take, {"pace": "rounds"}),
        (MOMENTUM, take, {"compression": "fp16"}),
        (MOMENTUM, take, {"compression": "bf16"}),
    ],
    ids=lambda one: one.name if isinstance(one, Case) else getattr(one, "__name__", str(one)),
)
@both
def test_replicas_hold_the_same_weights(binding, case, step, options, tapes):
    given = dict(options)
    if "compression" in given:
        given["compression"] = getattr(binding.hvd.Compression, given["compression"])
    ends = train(binding, case, lambda rank: given, step)
    check(binding, case, ends, tapes, lambda rank: range(RANKS))
    if "hierarchical" not in options:
        assert min(ends[SLOW].seen) > 1, "nobody was late: the example has lost its point"


@both
@pytest.mark.parametrize("sets", [((0, 1), (2, 3)), ((0, 1, 3),)], ids=["all in one", "one outside"])
def test_process_sets_extrapolate_separately(binding, sets, tapes):
    """A rank outside extrapolates nothing."""
    known = [ProcessSet(*ranks, number=number) for number, ranks in enumerate(sets, 1)]

    def own(rank: int) -> ProcessSet:
        return next((one for one in known if rank in one.ranks), known[0])

    ends = train(binding, MOMENTUM, lambda rank: {"process_set": own(rank)}, take)
    check(binding, MOMENTUM, ends, tapes, lambda rank: own(rank).ranks if rank in own(rank).ranks else [rank])


def test_an_overflow_under_a_grad_scaler_changes_no_lead(tapes):
    """Its rank applies what the others bring, and its gradient is left out."""
    scalers = [
        torch.amp.GradScaler("cpu", init_scale=2.0 ** (2 + rank), growth_interval=10**6) for rank in range(RANKS)
    ]

    def scaled(one: Any, rank: int, step: int) -> None:
        given = gradient(rank, step) * scalers[rank].scale(torch.ones(())).numpy()
        one.backward([[np.full(SIZE, np.inf) if (rank, step) in {(1, 1), (2, 3)} else given]])
        scalers[rank].step(one.opt)
        scalers[rank].update()

    ends = train(TORCH, MOMENTUM, lambda rank: {"scaler": scalers[rank]}, scaled)
    check(TORCH, MOMENTUM, ends, tapes, lambda rank: range(RANKS))


@pytest.mark.parametrize("every", [None, 2])
def test_keras_moving_averages_are_of_the_weights(every):
    """Also where they overwrite the weights every ``n`` steps, which is no part of an update."""

    def averaged(variables: Any) -> Any:
        return keras.optimizers.SGD(
            MOMENTUM.lr, momentum=MOMENTUM.momentum, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=every
        )

    with scripted_engine(4):
        trainer = KERAS.trainer(averaged, weight_prediction=2)
        worker = ScriptedWorker(Script("six", ((4,),) * 6), 4, trainer.weights().size, MOMENTUM.lr, tf.constant)
        attach(trainer.opt, worker)
    average = weights = trainer.weights().astype(np.float64)
    for step in range(6):
        before = replay("keras", MOMENTUM, np.zeros(weights.size), worker.applied, 4, 2)
        trainer.train(0, [step])
        weights = weights + replay("keras", MOMENTUM, np.zeros(weights.size), worker.applied, 4, 2) - before
        average = weights if step == 0 else 0.5 * average + 0.5 * weights
        if every and (step + 1) % every == 0:
            weights = average
        np.testing.assert_allclose(trainer.weights(), weights, rtol=0, atol=1e-6)
    found = np.concatenate([np.ravel(one) for one in trainer.opt._model_variables_moving_average])
    np.testing.assert_allclose(found, average, rtol=0, atol=1e-6)
