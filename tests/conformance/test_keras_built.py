"""Keras: README's ``fit()`` with the usual models, most of which have no weights before their first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvd_async.tensorflow.keras as hvd
from hvd_async.tensorflow.variables import is_built
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.elastic_board import Board, Exchange, keras_callbacks_over_a_board
from tests.conformance.keras_ranks import LOSS, compiled, flat
from tests.conftest import LONG_RUN

EXAMPLES, CLASSES = 8, 3
LABELS = np.arange(EXAMPLES) % CLASSES


def values(*shape: int) -> Any:
    return np.random.default_rng(3).normal(size=(EXAMPLES, *shape)).astype(np.float32)


def model_of(call: Callable[..., Any], *, build: Any = None, **parts: Any) -> keras.Model:
    """Return a subclassed model with these layers."""

    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    Subclassed.call = call
    if build is not None:
        Subclassed.build = build
    return Subclassed()


def two_outputs() -> keras.Model:
    given = keras.Input((4,))
    hidden = layers.Dropout(0.2)(layers.Dense(5, activation="relu")(given))
    return keras.Model(given, {"one": layers.Dense(CLASSES)(hidden), "two": layers.Dense(CLASSES)(hidden)})


def own_weights(model: Any, shape: Any) -> None:
    model.kernel = model.add_weight((shape[-1], CLASSES))


def prepared() -> keras.Model:
    normalized, pixels = layers.Normalization(), values(4, 4, 2)
    normalized.adapt(pixels)
    augmented = [normalized, layers.Rescaling(0.5), layers.RandomFlip(), layers.RandomRotation(0.1)]
    return keras.Sequential([*augmented, layers.Flatten(), layers.Dense(CLASSES)])


def of_texts() -> keras.Model:
    words = layers.TextVectorization(8, output_sequence_length=3, vocabulary=["a", "b", "c"])
    return keras.Sequential([words, layers.Embedding(8, 4), layers.Flatten(), layers.Dense(CLASSES)])


class Adversarial(keras.Model):
    """A model without ``call()``, whose networks only its own step calls."""

    def __init__(self, built: bool = True) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(4), layers.Dropout(0.2)])
        self.judge = keras.Sequential([layers.Dense(CLASSES)])
        if built:
            self.judge(self.encoder(values(4)))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = LOSS(y, self.judge(self.encoder(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def dense(*before: Any) -> keras.Model:
    return keras.Sequential([*before, layers.Dense(CLASSES)])


def half(policy: str) -> Any:
    keras.config.set_dtype_policy(policy)  # (of this thread)
    try:
        return dense(layers.Dropout(0.2), layers.Dense(4))
    finally:
        keras.config.set_dtype_policy("float32")


def frozen() -> keras.Model:
    still = layers.Dense(4)
    still.trainable = False
    return dense(still, layers.Dropout(0.2))


def tensors(x: Any, batch: int = 2, *, shaped: bool = True) -> Any:
    """Return what a generator gives, with the shapes of the batches or without."""
    kinds = (tf.TensorSpec((None, *x.shape[1:]) if shaped else None, x.dtype), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(
        lambda: ((x[i : i + batch], LABELS[i : i + batch]) for i in range(0, EXAMPLES, batch)), output_signature=kinds
    )


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dense": lambda: (dense(), values(4)),
    "dropout": lambda: (dense(layers.Flatten(), layers.Dropout(0.2)), values(2, 2)),
    "batch norm": lambda: (
        dense(layers.Conv2D(2, 3), layers.BatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D()),
        values(5, 5, 1),
    ),
    "embedding": lambda: (dense(layers.Embedding(9, 4), layers.GlobalAveragePooling1D()), values(6) > 0),
    "subclassed": lambda: (
        model_of(lambda self, x: self.out(self.drop(x)), drop=layers.Dropout(0.2), out=layers.Dense(CLASSES)),
        values(4),
    ),
    "own weights": lambda: (model_of(lambda self, x: x @ self.kernel, build=own_weights), values(4)),
    "two outputs": lambda: (two_outputs(), values(4)),
    "LSTM": lambda: (dense(layers.LSTM(4, dropout=0.1)), values(2, 2)),
    "bidirectional": lambda: (dense(layers.Bidirectional(layers.GRU(3))), values(2, 2)),
    "attention": lambda: (
        model_of(
            lambda self, x: self.out(self.flat(self.heads(x, x))),
            heads=layers.MultiHeadAttention(2, 2, dropout=0.1),
            flat=layers.Flatten(),
            out=layers.Dense(CLASSES),
        ),
        values(6, 4),
    ),
    "nested": lambda: (
        model_of(
            lambda self, x: self.outer(self.inner(x)),
            inner=keras.Sequential([layers.Dense(4), layers.Dropout(0.2)]),
            outer=dense(keras.Sequential([layers.Dense(4, "relu")])),
        ),
        values(4),
    ),
    "preprocessing": lambda: (prepared(), values(4, 4, 2)),
    "texts": lambda: (of_texts(), tf.constant([["a b"], ["c"]] * (EXAMPLES // 2))),
    "dictionary": lambda: (
        model_of(
            lambda self, x: self.out(tf.concat([self.one(x["one"]), x["two"]], 1)),
            one=layers.Dense(4),
            out=layers.Dense(CLASSES),
        ),
        {"one": values(4), "two": values(2)},
    ),
    "pair": lambda: (
        model_of(lambda self, x: self.out(self.drop(x[0] + x[1])), drop=layers.Dropout(0.2), out=layers.Dense(CLASSES)),
        (values(4), values(4)),
    ),
    "bfloat16": lambda: (half("mixed_bfloat16"), values(4)),
    "float16": lambda: (half("mixed_float16"), values(4)),
    "frozen": lambda: (frozen(), values(4)),
    "train_step()": lambda: (Adversarial(), values(4)),
    "generator": lambda: (dense(layers.Dropout(0.2)), tensors(values(4))),
}


IN_GRAPHS = ("batch norm", "own weights", "two outputs", "float16", "train_step()", "generator")
"""Models whose ``fit()`` is traced in an ordinary run: how Keras builds a model from a batch differs there."""


@pytest.fixture
def _over_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are threads, to which the callback sends over a board."""
    Exchange.board = Board(2)
    keras_callbacks_over_a_board(monkeypatch)


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "eagerly"),
    [
        pytest.param(kind, eagerly, id=f"{kind}-{'eager' if eagerly else 'graph'}")
        for kind in MODELS
        for eagerly in ((False, True) if LONG_RUN else (kind not in IN_GRAPHS,))
    ],
)
@pytest.mark.usefixtures("_over_a_board")
def test_the_usual_models_train_from_rank_0s_weights(kind, eagerly):
    def train(rank: int) -> Any:
        model, x = MODELS[kind]()
        loss = {"one": LOSS, "two": LOSS} if kind == "two outputs" else LOSS
        metrics = None if kind in ("two outputs", "train_step()") else ["accuracy"]
        adam = keras.optimizers.Adam(0.01)
        scaled = keras.optimizers.LossScaleOptimizer(adam) if kind == "float16" else adam
        opt = hvd.EagerOptimizer(scaled, quorum="all")
        compiled(opt, model, loss=loss, metrics=metrics, run_eagerly=eagerly)
        y = {"one": LABELS, "two": LABELS} if kind == "two outputs" else LABELS
        given = {"x": x} if isinstance(x, tf.data.Dataset) else {"x": x, "y": y, "batch_size": 4}
        epochs = 1 if eagerly else 2  # (a graph's second one costs nothing)
        history = model.fit(
            **given, epochs=epochs, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        ).history
        assert np.isfinite(history["loss"]).all()
        assert opt.stats().steps == epochs * (2 if "batch_size" in given else 4)
        assert is_built(model)
        return flat(model.trainable_variables)

    one, other = Cluster(2).run(train)
    assert one.tobytes() == other.tobytes()
    assert one.size


UNBUILT: dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any]]] = {
    "only a train_step()": (lambda: (Adversarial(built=False), values(4)), {}),
    "unknown shapes": (lambda: (dense(), tensors(values(4), shaped=False)), {}),
    "a call that reads values": (
        lambda: (model_of(lambda self, x: self.out(x * float(x[0, 0].numpy())), out=layers.Dense(CLASSES)), values(4)),
        {"run_eagerly": True},
    ),
    "the wrong shape": (lambda: (dense(layers.LSTM(4)), values(4)), {}),
}


@pytest.mark.parametrize("kind", UNBUILT)
def test_a_model_that_its_first_batch_cannot_build_is_refused_with_the_line_to_write(kind):
    (make, options), callback = UNBUILT[kind], hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with scripted_engine(1):
        model, x = make()
        compiled(hvd.EagerOptimizer(keras.optimizers.SGD(0.1)), model, **options)
        given = {"x": x} if isinstance(x, tf.data.Dataset) else {"x": x, "y": LABELS}
        with pytest.raises(ValueError, match=r"the first batch cannot build(.|\n)*model\.build\(input_shape\)"):
            model.fit(**given, verbose=0, callbacks=[callback])


def test_weights_are_sent_once_they_are_there_and_a_fit_without_batches_leaves_nothing_to_send(monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(hvd.callbacks, "broadcast_variables", lambda variables, root_rank: sent.append(root_rank))

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("broken")

    def fit(model: Any, root: int, *more: Any) -> None:
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root), *more]
        model.fit(values(4), LABELS, verbose=0, callbacks=callbacks)

    with scripted_engine(1):
        model = compiled(keras.optimizers.SGD(0.1), dense(layers.Dropout(0.2)))
        with pytest.raises(RuntimeError, match="broken"):
            fit(model, 1, Breaks())
        fit(model, 2)
        fit(model, 3)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(4)
        callback.set_model(compiled(None, Adversarial(), loss=None))  # (without an optimizer of its own, as a GAN)
        callback.on_train_begin()
    assert sent == [2, 3, 4]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: dense(layers.Dropout(0.2)), False),
        (lambda: keras.Sequential([keras.Input((4,)), layers.Dropout(0.2), layers.Dense(3)]), True),
        (lambda: Adversarial(built=False), False),
        (Adversarial, True),
        (two_outputs, True),
        (lambda: model_of(lambda self, x: x @ self.kernel, build=own_weights), False),
    ],
)
def test_a_model_is_built_when_it_has_its_weights(make, expected):
    assert is_built(make()) is expected


def test_an_optimizer_is_not_built_of_a_model_without_weights():
    with scripted_engine(1):
        model = dense(layers.Dropout(0.2))
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), model=model)
        with pytest.raises(ValueError, match="the model has no weights yet"):
            opt._async.replica.prepare()
