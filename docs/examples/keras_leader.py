"""Leaders in Keras: handwritten digits; run `horovodrun -np 2 --gloo python docs/examples/keras_leader.py`."""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvd_async.tensorflow.keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
images, labels = load_digits(return_X_y=True)
train, test, train_labels, test_labels = train_test_split(images / 16, labels, random_state=0)
own = slice(hvd.rank(), None, hvd.size())  # this rank's share

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
)
optimizer = hvd.LeaderOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), algorithm="lsgd")
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
model.fit(  # which records the losses that leaders are chosen by
    train[own],
    train_labels[own],
    batch_size=32,
    epochs=20,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],  # and drains when fit() ends: the leader's weights
)

_, accuracy = model.evaluate(test, test_labels, verbose=0)
distance, led = optimizer.consensus_distance(), optimizer.stats().led  # the first a collective: every rank calls it
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f}; pulls led by rank: {led}; replicas differ by {distance}")
