"""fit() with tf.data, callbacks, files: `horovodrun -np 2 --gloo python docs/examples/recipes/keras_fit.py`."""

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvd_async.tensorflow.keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
folder = pathlib.Path(tempfile.mkdtemp())  # rank 0's is used
images, labels = load_digits(return_X_y=True)
train, test, train_labels, test_labels = train_test_split(images.astype("float32") / 16, labels, random_state=0)
data = (
    tf.data.Dataset.from_tensor_slices((train, train_labels))
    .shard(hvd.size(), hvd.rank())  # before shuffle(): else ranks' shares overlap
    .shuffle(len(train), seed=hvd.rank())
    .batch(32)
    .prefetch(tf.data.AUTOTUNE)
)
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
)
optimizer = hvd.EagerOptimizer(
    keras.optimizers.SGD(0.1, momentum=0.9),
    quorum="majority",
    round_transform=lambda gradients: hvd.clip_by_global_norm(gradients, 1.0)[0],
)
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # and drains at the end of each epoch
    hvd.callbacks.MetricAverageCallback(),  # so that all ranks see the same losses, and stop in the same epoch
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2),
    keras.callbacks.EarlyStopping("val_loss", patience=5),
]
if hvd.rank() == 0:  # after ours, which drain
    callbacks.append(keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True))
history = model.fit(data, epochs=15, validation_data=(test, test_labels), callbacks=callbacks, shuffle=False, verbose=0)

distance = optimizer.consensus_distance()  # a collective: every rank calls it
if hvd.rank() == 0:
    model.save(folder / "last.keras")
    served = keras.models.load_model(folder / "last.keras")  # without Horovod; to train on: hvd.load_model()
    alike = np.array_equal(served.predict(test, verbose=0), model.predict(test, verbose=0))
    best = keras.models.load_model(folder / "best.keras").evaluate(test, test_labels, verbose=0)[0]
    print(f"the saved model predicts alike: {alike}; best.keras has the least val_loss: {best:.5f}")
    print(f"least val_loss {min(history.history['val_loss']):.5f} of {len(history.epoch)} epochs")
    accuracy = history.history["val_accuracy"][-1]
    print(f"test accuracy {accuracy:.3f} after {optimizer.rounds} rounds; replicas differ by {distance}")
