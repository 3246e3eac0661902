"""Keras: the weights are those of the reference on the same rounds, whatever these were, eagerly and in a graph."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, SCHEDULES, SCRIPTS, Case
from tests.conformance.drive import ScriptedWorker, attach, check_late_rank, scripted_engine, with_late_rank
from tests.conformance.keras_ranks import KerasTrainer, conv_model, flat, plain
from tests.conformance.reference import replay

by_name = functools.partial(pytest.mark.parametrize, ids=lambda one: one.name)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@by_name("case", CASES)
def test_scripted_rounds(case, graph):
    for script in SCRIPTS:
        with scripted_engine(size=4):
            trainer = KerasTrainer(case, graph)
            worker = ScriptedWorker(script, 4, trainer.weights().size, case.lr, tf.constant)
            attach(trainer.opt, worker)
            before = trainer.weights()
            for step in range(1, len(script.steps) + 1):
                gradient = trainer.gradient(0, step)
                trainer.step()
                assert worker.handed[-1].tolist() == [*gradient, 1.0]
                expected = replay("keras", case, before, worker.applied, 4)
                np.testing.assert_allclose(trainer.weights(), expected, rtol=0, atol=1e-5)
            assert int(trainer.opt.iterations) == sum(one.sums[-1] > 0 for one in worker.applied)


@by_name("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_rounds_of_a_cluster_with_a_late_rank(case, schedule, tapes):
    graph = CASES.index(case) % 2 == SCHEDULES.index(schedule)  # (tracing is slow: each case once)
    outcomes = with_late_rank(schedule, lambda rank: KerasTrainer(case, graph, quorum=schedule.quorum))
    check_late_rank("keras", lambda x, rounds: replay("keras", case, x, rounds, schedule.size), outcomes, tapes)


@by_name("case", [CASES[0], CASES[2], CASES[7]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_quorum_all_equals_averaging_by_hand(case, size):
    steps = 5

    def train(rank: int) -> np.ndarray:
        trainer = KerasTrainer(case, quorum="all")
        trainer.train(rank, range(steps))
        trainer.opt.drain()
        return trainer.weights()

    reader = KerasTrainer.__new__(KerasTrainer)
    reader.model = conv_model()
    optimizer = plain(case)
    variables = reader.model.trainable_variables
    optimizer.build(variables)
    for step in range(steps):
        average = sum(reader.gradient(rank, step) for rank in range(size)) / size
        parts = np.split(average.astype(np.float32), np.cumsum([np.prod(v.shape) for v in variables])[:-1])
        gradients = [part.reshape(v.shape) for part, v in zip(parts, variables, strict=True)]
        optimizer.apply([tf.constant(g) for g in gradients])
    for weights in Cluster(size).run(train):
        np.testing.assert_allclose(weights, flat(variables), rtol=0, atol=1e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_empty_rounds_move_nothing(graph):
    case = Case("momentum-decay", "sgd", 0.1, momentum=0.9, weight_decay=0.1)
    with scripted_engine(size=2):
        trainer = KerasTrainer(case, graph)
        attach(trainer.opt, ScriptedWorker(SCRIPTS[2], 2, trainer.weights().size, case.lr, tf.constant))
        trainer.train(0, range(1))
        weights, state = trainer.weights(), trainer.opt.get_state()
        trainer.train(0, range(1, 2))  # an empty round
        assert trainer.weights().tolist() == weights.tolist()
        for path, value in trainer.opt.get_state().items():
            assert path == "hvd_async.rounds" or np.array_equal(value, state[path]), path
