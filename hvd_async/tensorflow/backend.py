"""The backend that Keras must run on."""

from __future__ import annotations

import keras


def check_backend(error: type[Exception] = ValueError) -> None:
    """Refuse Keras on another backend than TensorFlow.

    Args:
        error: the class of the error: ``ImportError`` while a module is imported.

    Raises:
        Exception: of the class ``error``, if Keras runs on another backend.
    """
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise error(
            f"Keras' backend must be 'tensorflow' for hvd_async's Keras optimizers and callbacks, got {backend!r}. Set "
            f"KERAS_BACKEND=tensorflow in the environment before Keras is imported (or 'backend' in "
            f"~/.keras/keras.json); a torch model in a loop of its own takes hvd_async.torch"
        )
