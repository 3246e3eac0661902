"""The weights are those of the reference on the same rounds, or of a plain optimizer fed with averages, in either
binding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, SCRIPTS, Case, Script
from tests.conformance.drive import wait_for_rounds
from tests.conformance.eager_ranks import ADAM, KERAS, KERAS_GRAPH, TINY, TORCH, Binding
from tests.conformance.keras_ranks import KerasTrainer, apply_plainly, conv_model, flat
from tests.conformance.reference import Applied, replay
from tests.conftest import LONG_RUN

EVERY_SCRIPT = Script("all", tuple(step for script in SCRIPTS for step in script.steps))
NESTEROV = CASES[5]
AHEAD = (1, 2, 3)
"""``weight_prediction`` of the cases, by turns."""


def by_case(binding: Binding, name: str, cases: list[Case], first: int) -> list[Any]:
    rows = [(case, AHEAD[(first + place) % len(AHEAD)]) for place, case in enumerate(cases)]
    return [pytest.param(binding, case, ahead, id=f"{name}-{case.name}-{ahead}") for case, ahead in rows]


@pytest.mark.parametrize(
    ("binding", "case", "ahead"),
    by_case(TORCH, "torch", CASES, 0)
    + by_case(KERAS, "keras", CASES, 1)
    + by_case(KERAS_GRAPH, "keras-graph", CASES[5::2], 2),
)
def test_scripted_rounds(binding, case, ahead):
    """None, one or several rounds a step, empty ones among them: these move neither weights nor momentum. The model
    holds extrapolated weights."""
    trainer, worker = binding.scripted(case, EVERY_SCRIPT, 4, weight_prediction=ahead)
    before = trainer.weights()
    for step in range(len(EVERY_SCRIPT.steps)):
        gradient = trainer.gradient(0, step)
        trainer.step()
        assert worker.handed[-1].tolist() == [*gradient, 1.0]
        expected = replay(binding.framework, case, before, worker.applied, 4, ahead)
        np.testing.assert_allclose(trainer.weights(), expected, rtol=0, atol=1e-5)
        if binding is TORCH:
            assert flat(p.grad for p in trainer.parameters).tolist() == gradient.tolist(), "not put back"
    if binding is not TORCH:
        assert int(trainer.opt.iterations) == sum(one.sums[-1] > 0 for one in worker.applied)


@pytest.mark.parametrize(
    ("binding", "case"),
    [
        pytest.param(TORCH, ADAM, id="torch-adam"),
        pytest.param(KERAS, NESTEROV, id="keras-nesterov"),
        pytest.param(KERAS_GRAPH, ADAM, id="keras-graph-adam"),
    ],
)
def test_hosts_equal_a_reference_whose_ranks_are_hosts(binding, case):
    """Host 1 is late by three rounds: they are of host 0's sums, and the drain's carries all three steps of host 1."""
    three_taken = [threading.Event() for _ in range(2)]

    def train(rank: int) -> tuple[Any, ...]:
        trainer = binding.trainer(case, hierarchical=2)
        worker, before, gradients = trainer.opt._async.worker_now(), trainer.weights(), []
        if rank >= 2:
            assert all(event.wait(60) for event in three_taken)
            wait_for_rounds(worker, 3)
        for step in range(1, 4):
            gradients.append(trainer.gradient(rank, step).astype(np.float64))
            trainer.step()
        if rank < 2:
            three_taken[rank].set()
        trainer.opt.drain()
        return before, trainer.weights(), gradients, trainer.opt.rounds

    ranks = Cluster(4).run(train)
    first = [np.append(a + b, 2.0) for a, b in zip(ranks[0][2], ranks[1][2], strict=True)]
    late = np.append(sum([*ranks[2][2], *ranks[3][2]]), 6.0)
    expected = replay(binding.framework, case, ranks[0][0], [Applied(sums, case.lr) for sums in [*first, late]], 4, 2)
    for _, weights, _, rounds in ranks:
        assert rounds == 4
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("binding", "options"),
    [
        pytest.param(TORCH, {"bucket_cap_mb": TINY}, id="torch-buckets"),
        pytest.param(TORCH, {"compression": "fp16"}, id="torch-fp16"),
        pytest.param(TORCH, {"backward_passes_per_step": 2}, id="torch-passes"),
        pytest.param(KERAS, {"op": "Sum"}, id="keras-sum"),
    ],
)
def test_all_hosts_give_the_bits_of_all_ranks(binding, options):
    def given() -> dict[str, Any]:
        places = {"compression": binding.hvd.Compression, "op": binding.hvd}
        return {name: getattr(places[name], value) if name in places else value for name, value in options.items()}

    def train(rank: int) -> list[Any]:
        outcomes = []
        for quorum in ({"quorum": "all"}, {"hierarchical": 2, "quorum": 2}, {"hierarchical": 4, "quorum": 1}):
            trainer = binding.trainer(ADAM, **quorum, **given())
            trainer.train(rank, range(4))
            trainer.opt.drain()
            outcomes.append((trainer.state(), trainer.opt.stats().staleness, trainer.opt.stats().contributors[4]))
        return outcomes

    for plain, by_hosts, one_host in Cluster(4).run(train):
        assert by_hosts == one_host == plain


# -- Keras' own features --------------------------------------------------------------------------------------


class Signs(keras.optimizers.Optimizer):
    """An optimizer of the user's: moves by the sign of an averaged gradient."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.smooth = self.add_optimizer_variables(variables, "smooth")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        smooth = self.smooth[self._get_variable_index(variable)]
        self.assign(smooth, 0.5 * smooth + gradient)
        self.assign_sub(variable, keras.ops.sign(smooth) * keras.ops.cast(learning_rate, variable.dtype))


sgd = keras.optimizers.SGD
FEATURES: dict[str, Callable[[], Any]] = {
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "own": lambda: Signs(0.01),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, weight_decay=0.1),
    "callable": lambda: sgd(lambda: 0.07),
    "constant-scale": lambda: sgd(0.1, momentum=0.9, loss_scale_factor=8.0),
}
IN_A_STEP = ["accumulating", "callable", "constant-scale"]
"""Features in which the step that hands over has a part, and not only the update, which is a graph in either mode.
(Clipping, moving averages and schedules are in ``test_crossings``.)"""


@pytest.mark.parametrize(
    ("name", "graph"),
    [*((name, False) for name in FEATURES if LONG_RUN or name not in IN_A_STEP), *((name, True) for name in IN_A_STEP)],
    ids=lambda value: value if isinstance(value, str) else ("eager", "graph")[value],
)
def test_what_a_keras_optimizer_has_of_its_own_does_what_it_does_without_us(name, graph):
    make, steps = FEATURES[name], 6

    def train(rank: int) -> Any:
        trainer = KerasTrainer(lambda _: make(), graph, quorum="all")
        trainer.train(rank, range(steps))
        trainer.opt.drain()
        return flat(v.numpy() for v in [*trainer.parameters, *trainer.opt.variables])

    reader = KerasTrainer.__new__(KerasTrainer)
    reader.model = conv_model()
    reader.parameters = reader.model.trainable_variables
    plain = make()
    plain.build(reader.parameters)
    for step in range(steps):
        apply_plainly(plain, reader.parameters, (reader.gradient(0, step) + reader.gradient(1, step)) / 2)
    expected = flat(v.numpy() for v in [*reader.parameters, *plain.variables])
    outcomes = Cluster(2).run(train)
    assert outcomes[0].tobytes() == outcomes[1].tobytes()
    np.testing.assert_allclose(outcomes[0], expected, rtol=1e-5, atol=2e-6)
