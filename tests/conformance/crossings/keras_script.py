"""The training script of a Keras cell, run by our optimizers and by the plain one. As ``torch_script``.

A step is taken eagerly or, on ranks of a "keras-graph" cell and on one rank of a "keras-mixed" one, as a
``tf.function`` with forward and backward pass. The plain run is always eager: tracing takes most of a cell's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_async.tensorflow.elastic as keras_elastic
import hvd_async.tensorflow.keras as hvd
from hvd_async.tensorflow.variables import raw
from tests.conformance import keras_ranks
from tests.conformance.crossings.script import Script
from tests.conformance.crossings.table import (
    ARMS,
    CONNECTED,
    FROZEN,
    MIDDLE,
    NORMS,
    Cell,
    connects,
    drop_of,
    options_of,
    switched,
)
from tests.conformance.reference import Array
from tests.conformance.torch_ranks import ProcessSet

RATE = {"sgd": 0.1, "momentum": 0.05, "nesterov": 0.05, "adam": 0.02, "adamw": 0.02}
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "sgd": keras.optimizers.SGD,
    "momentum": lambda rate, **rest: keras.optimizers.SGD(rate, momentum=0.9, **rest),
    "nesterov": lambda rate, **rest: keras.optimizers.SGD(rate, momentum=0.8, nesterov=True, weight_decay=0.01, **rest),
    "adam": lambda rate, **rest: keras.optimizers.Adam(rate, beta_1=0.8, beta_2=0.9, **rest),
    "adamw": lambda rate, **rest: keras.optimizers.AdamW(rate, beta_1=0.8, beta_2=0.9, weight_decay=0.1, **rest),
}
BUFFERS: Mapping[str, tuple[str, Any]] = {
    "mask": ("float32", np.triu(np.full((4, 4), -np.inf), 1)),
    "bool": ("bool", np.array([True, False, True])),
    "integer": ("int64", np.arange(5)),
    "unsigned": ("uint16", np.arange(5)),
    "bfloat16": ("bfloat16", np.linspace(0, 1, 7)),
    "float16": ("float16", np.linspace(0, 1, 7)),
}
"""Variables that are neither trained nor statistics, used together with batch norm: dtype and values of each."""


class Gain(keras.layers.Layer):
    """A factor for each unit, and some variables that are not trained."""

    def __init__(self, kinds: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._kinds = kinds

    def build(self, shape: Any) -> None:
        """Make the variables."""
        self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")
        self.extras = []
        for kind in self._kinds:
            dtype, values = BUFFERS[kind]
            extra = self.add_weight(shape=values.shape, dtype=dtype, initializer="zeros", trainable=False, name=kind)
            extra.assign(tf.cast(values, dtype))
            self.extras.append(extra)

    def call(self, inputs: Any, with_gain: bool = True) -> Any:
        """Multiply."""
        return inputs * self.gain if with_gain else inputs


class Net(keras.Model):
    """Two layers; a script may leave ``gain`` out of a step."""

    def __init__(self, cell: Cell) -> None:
        dtype = "float32" if cell["dtype"] == "none" else cell["dtype"]
        super().__init__(name="net", dtype=dtype)
        kind, weights = cell["buffers"], cell["weights"]
        constraint = CONSTRAINTS.get(weights, lambda: None)()
        self.first = keras.layers.Dense(4, name="first", dtype=dtype, kernel_constraint=constraint)
        self.second = keras.layers.Dense(2, name="second", dtype=dtype)
        self.scale = Gain(BUFFERS if kind == "many" else (), name="scale", dtype=dtype)
        self.norm = None if kind in ("none", "dropout") else keras.layers.BatchNormalization(name="norm", dtype=dtype)
        self.drop = keras.layers.Dropout(1e-9, seed=3, name="drop") if kind == "dropout" else None
        self(np.zeros((2, 3), "float32"), training=False)
        draw = np.random.default_rng(7)
        for variable in sorted(self.trainable_variables, key=lambda one: one.path):
            bounded = constraint is not None and variable is self.first.kernel
            low, high = (0.0, 0.1) if bounded and weights == "non-neg" else (0.05 if bounded else -0.39, 0.39)
            values = draw.uniform(low, high, variable.shape)  # (some begin near the bound)
            if constraint is not None and variable is self.first.kernel:
                values = np.asarray(constraint(tf.constant(values, "float32")))
            variable.assign(values)
        self.scale.gain.assign(draw.uniform(0.7, 1.3, 4))

    def call(self, inputs: Any, training: bool = False, with_gain: bool = True) -> Any:
        """Map (n, 3) to (n, 2)."""
        hidden = tf.tanh(self.first(inputs))
        hidden = hidden if self.norm is None else self.norm(hidden, training=training)
        hidden = hidden if self.drop is None else self.drop(hidden, training=training)
        return self.second(self.scale(hidden, with_gain=with_gain))


CONSTRAINTS: Mapping[str, Callable[[], Any]] = {
    "non-neg": keras.constraints.NonNeg,
    "max-norm": lambda: keras.constraints.MaxNorm(0.5, axis=0),
    "unit-norm": lambda: keras.constraints.UnitNorm(axis=0),
}


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that rises from 0."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __call__(self, step: Any) -> Any:
        """Return the rate at a step."""
        return self._rate * tf.minimum(1.0, tf.cast(step, tf.float32) / 4)

    def get_config(self) -> dict[str, Any]:
        """Return what makes it."""
        return {"rate": self._rate}


class Run(Script):
    """One run of the script in Keras."""

    def __init__(self, cell: Cell, rank: int | None) -> None:
        super().__init__(cell, rank)
        self.make_net()
        self.kept: Array | None = None
        self.average: Array | None = None

    # -- what the script does ---------------------------------------------------------------------------------

    def elastic_state(self) -> Any:
        """Return an elastic job's."""
        return keras_elastic.TensorFlowKerasState(self.net, self.opt)

    def after_reset(self) -> None:
        self.trace()  # (as in the function that ``hvd.elastic.run`` decorates)

    def note_averages(self) -> None:
        """Note Keras' moving averages, before and after they are put in place, and those of the loop."""
        if self.cell["averages"].startswith("ema"):
            self.averages.append(self.ordered(self.opt._model_variables_moving_average))
            self.opt.finalize_variable_values(self.net.trainable_variables)
            self.averages.append(self.weights())
        if self.average is not None:
            self.averages.append(self.average)

    def take_step(self) -> None:
        """Take a step."""
        self.look()
        self.freeze()
        if self.cell["rate"] == "by-hand" and self.t == drop_of(self.cell):
            self.opt.learning_rate = 0.1 * self.rate()
        voices = self.voices()
        self.step(tuple(map(self.batch, voices)), tuple(map(self.with_gain, voices)))
        if self.cell["weights"] == "clamp-between":
            self.net.first.kernel.assign(tf.clip_by_value(raw(self.net.first.kernel), -0.4, 0.4))
        self.look()
        self.path.append(self.weights())
        self.rates.append((float(self.rate()),))
        if self.kept is not None:
            self.resting.append(self.bias())
        if self.cell["averages"] == "loop":
            own = self.path[-1]
            self.average = own if self.average is None else 0.6 * self.average + 0.4 * own

    def take(self, batches: Any, gains: tuple[bool, ...]) -> None:
        """Take a step with these batches."""
        with tf.GradientTape() as tape:
            losses = []
            for (inputs, targets), with_gain in zip(batches, gains, strict=True):
                outputs = self.net(inputs, training=True, with_gain=with_gain)
                losses.append(tf.reduce_mean(tf.square(outputs - targets)))
                if self.cell["training"] == "unused-on-a-rank" and len(losses) == 1 and self.rank in (None, 0):
                    losses[-1] -= 0.3 * tf.reduce_sum(self.net.scale.gain)
            loss = tf.add_n(losses) / len(losses)
        variables = self.variables()
        gradients = tape.gradient(loss, variables)
        if self.cell["gradients"] == "transform" and not (self.ours and self.arm.eager):
            gradients = clip(gradients)
        if not self.ours and self.arm.eager:  # (where gradients travel none is a gradient of 0, as in Horovod)
            gradients = [tf.zeros_like(v) if g is None else g for g, v in zip(gradients, variables, strict=True)]
        if self.ours and self.arm.wrapper == "LeaderOptimizer":
            self.opt.record_loss(loss)
        self.opt.apply(gradients, variables)

    def batch(self, voice: int) -> tuple[Any, Any]:
        """Return a rank's batch."""
        inputs, targets = self.draw(voice)
        return tf.constant(inputs, self.net.first.kernel.dtype), tf.constant(targets, self.net.first.kernel.dtype)

    def freeze(self) -> None:
        """Freeze a variable, or let it be trained again, where the script does."""
        level, bias = self.cell["training"], self.net.first.bias
        if not level.startswith("freeze"):
            return
        if self.t == FROZEN[0]:
            if level == "freeze-at-drain":
                self.drain()
            bias.trainable, self.kept = False, self.bias()
            self.trace()
        elif self.t == FROZEN[-1] + 1:
            self.drain()
            self.look()
            assert self.kept is not None
            self.frozen, self.kept, bias.trainable = [self.kept, self.bias()], None, True
            self.trace()

    def look(self) -> None:
        """Look at the weights, as a script may at any time between steps."""
        kernel, weights = np.array(raw(self.net.first.kernel)).astype(float), self.cell["weights"]
        slack = 1.02 if self.cell["dtype"] == "bfloat16" else 1.0001
        if weights == "non-neg" and kernel.min() < -1e-6:
            self.report(f"weights are not negative: {kernel.min():.3g}")
        if weights == "max-norm" and np.linalg.norm(kernel, axis=0).max() > 0.5 * slack:
            self.report(f"columns have norms up to 0.5: {np.linalg.norm(kernel, axis=0).max():.3g}")
        if weights == "unit-norm" and not self.arm.mixes:
            far = np.abs(np.linalg.norm(kernel, axis=0) - 1.0).max()
            if far > slack - 0.9999:
                self.report(f"columns have unit norm: {far:.3g} off")
        moved = self.cell.moved_by_ends
        if weights == "clamp-between" and len(self.path) > 1 and not moved and np.abs(kernel).max() > 0.4 * slack:
            self.report(f"weights are clamped to 0.4: they are {np.abs(kernel).max():.3g}")
        if self.kept is None or (self.cell["training"] == "freeze" and self.cell.moves_frozen):
            return
        overwrites = self.cell["averages"] == "ema-overwrite"  # (Keras itself overwrites frozen variables as well)
        if not overwrites and not np.allclose(self.bias(), self.kept, rtol=1e-5, atol=1e-6):
            self.report("a frozen parameter keeps its weights: it has moved")

    def middle(self) -> None:
        """Do what the script does in its middle."""
        level = self.cell["middle"]
        if self.cell["looks"] == "drain":
            self.drain()
        elif self.cell["looks"] == "consensus" and self.ours:
            own = self.weights()
            with self.opt.consensus():
                self.look()
                self.drained.append(self.weights().tobytes())
            # (the cut at its begin applies constraints; Keras' norms change by 1e-7 each time)
            slack = 1e-6 if self.cell["weights"] in NORMS else 0.0
            if not (self.arm.late or np.allclose(own, self.weights(), rtol=0.0, atol=slack)):
                self.report("after consensus() weights are the rank's own: others")
            self.opt.consensus_distance()
        if level == "switch" and self.ours:
            self.opt.switch(**switched(self.cell, back=self.t != MIDDLE[0]))
        elif level in ("resume", "cut"):
            if level == "resume":
                self.drain()
            elif self.ours and not self.cut(lambda: self.opt.get_state()):
                return
            weights = [np.array(raw(v)) for v in self.net.variables]
            state = self.opt.get_state() if self.ours else {v.path: v.numpy() for v in self.opt.variables}
            state = {name: np.array(value) for name, value in state.items()}
            if self.ours:
                self.opt.discard()
                self.rounds = 0
            self.make_net()
            self.net.first.bias.trainable = self.kept is None
            for variable, own in zip(self.net.variables, weights, strict=True):
                raw(variable).assign(own)
            self.make_optimizer(state)
        elif level == "remade":
            self.drain()
            rate, schedule = self.rate(), self.cell["rate"] in ("drop", "warm-up")
            iterations = int(raw(self.opt.iterations))
            if self.ours:
                self.rounds += self.opt.rounds
                self.opt.discard()
            self.make_optimizer()
            if schedule:
                self.opt.iterations.assign(iterations)
            else:
                self.opt.learning_rate = rate

    # -- what it is made of -----------------------------------------------------------------------------------

    @property
    def gain(self) -> slice:
        """Where the gains lie in the weights."""
        return slice(-4, None)

    def variables(self) -> list[Any]:
        """Return what is trained."""
        return list(self.net.trainable_variables)

    def make_net(self) -> None:
        """Make the model, and note what is trained, also what is frozen for some steps."""
        self.net = Net(self.cell)
        self.every = self.variables()

    def make_optimizer(self, state: Mapping[str, Any] | None = None) -> None:
        """Make an optimizer for the model as it is."""
        kind = "momentum" if self.cell["optimizer"] == "none" else self.cell["optimizer"]
        rate: Any = RATE[kind]
        if self.cell["rate"] == "drop":
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([drop_of(self.cell) - 1], [rate, 0.1 * rate])
        elif self.cell["rate"] == "warm-up":
            rate = WarmUp(rate)
        options: dict[str, Any] = dict(GRADIENTS.get(self.cell["gradients"], {}))
        options |= AVERAGES.get(self.cell["averages"], {})
        plain = OPTIMIZERS[kind](rate, **options)
        self.opt = self.wrapped(plain) if self.ours else plain
        self.opt.build(self.every)
        if state is not None and self.ours:
            self.opt.set_state(state)
        elif state is not None:
            for variable, value in zip(self.opt.variables, state.values(), strict=True):
                variable.assign(value)
        self.trace()

    def trace(self) -> None:
        """Let the next step be traced."""
        self.step = tf.function(self.take, reduce_retracing=False) if self.in_graph else self.take

    @property
    def in_graph(self) -> bool:
        """Whether a step is a graph: in mixed cells on rank 0 of some arms, and on rank 1 of others."""
        mixed = self.cell.binding == "keras-mixed" and self.rank == len(self.cell.arm) % 2
        return mixed or (self.ours and self.cell.binding == "keras-graph")

    def wrapped(self, plain: Any) -> Any:
        """Return this library's optimizer."""
        options = options_of(self.cell, hvd, ProcessSet)
        if self.cell["gradients"] == "transform" and self.arm.eager:
            options["round_transform"] = clip
        if self.cell["buffers"] != "none":
            options["model"] = self.net
        return getattr(hvd, self.arm.wrapper)(plain, **options)

    def weights(self) -> Array:
        """Return all weights, flat, float64."""
        return self.ordered(self.every)

    def ordered(self, values: Sequence[Any]) -> Array:
        """Return values of all weights, flat, by the weights' paths, the gains' last."""
        places = [(v is self.net.scale.gain, v.path, place) for place, v in enumerate(self.every)]
        return flat64(values[place] for *_, place in sorted(places))

    def bias(self) -> Array:
        """Return the weights of the parameter that may be frozen."""
        return flat64([self.net.first.bias])

    def rate(self) -> Any:
        """Return the learning rate."""
        return float(np.array(self.opt.learning_rate))

    def constant_values(self) -> list[Array]:
        """Return copies of variables that no training changes."""
        return [np.array(raw(v)) for v in self.net.scale.extras]

    def drain(self) -> None:
        """Drain, and look at what a drain leaves."""
        if not self.ours:
            return
        norm = self.net.norm
        averaged = [] if norm is None else [norm.moving_mean, norm.moving_variance]
        before = flat64(averaged)
        self.opt.drain()
        if averaged:
            self.statistics.append((before, flat64(averaged)))
        every = [v for v in self.net.variables if "seed" not in v.path]
        self.drained.append(b"".join(np.array(raw(v)).tobytes() for v in every))
        for own, now in zip(self.constants, self.constant_values(), strict=True):
            if own.tobytes() != now.tobytes():
                self.report("a variable that is no statistic: changed")


def flat64(variables: Iterable[Any]) -> Array:
    """Variables as one vector in float64."""
    return np.concatenate([np.zeros(0), *(np.array(raw(v)).astype(np.float64).ravel() for v in variables)])


def clip(gradients: list[Any]) -> list[Any]:
    """Clip by the global norm."""
    clipped: list[Any] = tf.clip_by_global_norm(gradients, 0.5)[0]
    return clipped


GRADIENTS: Mapping[str, Mapping[str, Any]] = {
    "clipnorm": {"clipnorm": 0.2},
    "global-clipnorm": {"global_clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.1},
    "transform": {},
}
AVERAGES: Mapping[str, Mapping[str, Any]] = {
    "ema": {"use_ema": True, "ema_momentum": 0.6},
    "ema-overwrite": {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3},
    "loop": {},
}
LEVELS: Mapping[str, Mapping[str, Any]] = {
    "optimizer": OPTIMIZERS,
    "weights": {**CONSTRAINTS, "clamp-between": None},
    "averages": AVERAGES,
    "gradients": GRADIENTS,
    "training": dict.fromkeys(["freeze", "freeze-at-drain", "unused", "unused-on-a-rank"]),
    "rate": dict.fromkeys(["drop", "warm-up", "by-hand"]),
    "buffers": dict.fromkeys(["norm", "dropout", "many"]),
    "dtype": dict.fromkeys(["float64", "bfloat16"]),
    **{factor: dict.fromkeys(levels) for factor, levels in CONNECTED.items()},
    "looks": dict.fromkeys(["drain", "consensus"]),
    "middle": dict.fromkeys(["resume", "cut", "remade", "switch", "elastic"]),
}
"""By factor and level."""
IDLE: Mapping[str, Mapping[str, str]] = {
    "averages": {"ema": "none", "loop": "none"},
    "buffers": {"dropout": "none", "many": "norm"},
    "set": {"set": "none"},
}
"""Levels that change no weights, and the level that does as much."""


def equivalent(cell: Cell) -> Cell:
    """Return a cell whose ranks' weights are the same, without what changes none, and with eager steps."""
    return Cell("keras", cell.arm, {f: IDLE.get(f, {}).get(level, level) for f, level in cell.levels.items()})


def allowed(levels: Mapping[str, str]) -> bool:
    """Return whether levels may meet (those of "arm" among them) in a cell that runs to its end."""
    arm = ARMS.get(levels.get("arm", ""))
    if not connects(levels):
        return False
    if arm is None:
        return True
    if levels.get("dtype") == "bfloat16" and not arm.eager:
        return False  # (refused)
    if arm.late and levels.get("weights") == "clamp-between":
        return False  # (of ranks that have seen other rounds: a limit, see docs/limits.md)
    if levels.get("optimizer") in ("sgd", "adam", "adamw") and arm.options.get("quasi_global"):
        return False  # (refused)
    if arm.own and arm.plain and levels.get("buffers") not in (None, "none", "dropout"):
        return False  # (each rank's batch norm sees its own batch)
    return not (levels.get("training") == "unused-on-a-rank" and not (arm.own and arm.ranks > 1))


assert keras_ranks  # (imported before anything has run in TensorFlow: it sets the number of threads)
