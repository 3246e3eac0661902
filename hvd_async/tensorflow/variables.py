"""Keras variables as one vector and back, without a copy on a CPU; their checksums; buffers of models."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_async.algorithms.gossip.message_format import vector_with_room
from hvd_async.optimizers import agreement
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.memory import ALIGNMENT, ReusedBlocks

Array = np.ndarray[Any, Any]

# -- NumPy's memory as TensorFlow's ------------------------------------------------------------------------------------


def given_to_tensor(array: Array) -> tf.Tensor:
    """Return an array as a tensor, in the same memory if TensorFlow's kernels can use it; variables that are assigned
    the tensor, or a slice of it, share it too. So the array becomes read-only: the caller transfers it."""
    if array.dtype.kind != "f" or array.ctypes.data % ALIGNMENT or not array.flags.writeable or not array.size:
        return tf.convert_to_tensor(array)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    array.flags.writeable = False
    return tensor


@functools.lru_cache
def constant(value: bool | float | tuple[float, ...], dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of one or several numbers, from a cache of recent ones: a new one takes 10 to 50 us."""
    return tf.constant(value, dtype)


def is_finite(vector: tf.Tensor) -> bool:
    """Return whether a vector holds neither NaN nor an infinity."""
    array = np.asarray(vector)  # (no copy on the CPU)
    # NaN and infinities persist in a scalar product, which takes half as long as a look at each element. But it may
    # overflow for finite vectors too.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(array, array)) or np.isfinite(array).all())


# -- variables ---------------------------------------------------------------------------------------------------------


SCHEDULE_FREE = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
"""Optimizers whose ``beta_1`` is no momentum: they derive averages from the weights (Keras 3.13 and later)."""
STATISTICS = ("moving_mean", "moving_variance")
"""Names that Keras' batch norm gives its running statistics."""
SEED = "seed_generator_state"
"""Name that Keras gives the state of each ``SeedGenerator``."""


def raw(variable: Any) -> Any:
    """Return the ``tf.Variable`` behind a Keras variable, or the variable itself."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def checksum(variable: Any) -> int:
    """Return the CRC-32 of a variable's bytes."""
    return zlib.crc32(raw(variable).numpy().tobytes())


def signature(variable: Any) -> str:
    """Return name, shape and dtype in one string, for comparison over ranks."""
    name = getattr(variable, "path", None) or variable.name
    return f"{name} {tuple(variable.shape)} {raw(variable).dtype.name}"


def own_name(variable: Any) -> str:
    """Return a variable's name without that of its optimizer, which Keras numbers separately in each process."""
    return str(variable.path).rpartition("/")[2]


def by_name(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables of an optimizer by ``own_name``, with a number for the second of a name and later ones."""
    found: dict[str, Any] = {}
    for variable in variables:
        name, numbers = own_name(variable), itertools.count(2)
        key = name
        while key in found:
            key = f"{name}:{next(numbers)}"
        found[key] = variable
    return found


def frozen(optimizer: Any) -> list[int]:
    """Return the indices of a built optimizer's variables that are frozen at present."""
    return [index for index, variable in enumerate(optimizer._trainable_variables) if not variable.trainable]


def is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a ``keras.random.SeedGenerator``, such as that of a dropout layer.

    Ranks draw different random numbers because it differs between them: it is never sent, averaged, or compared.
    """
    state = raw(variable)
    return _last_part(variable) == SEED and state.dtype.is_integer and tuple(state.shape) == (2,)


def is_statistic(variable: Any) -> bool:
    """Return whether a variable is a running mean or variance of batch norm."""
    return _last_part(variable) in STATISTICS and raw(variable).dtype.is_floating


def _last_part(variable: Any) -> str:
    name = getattr(variable, "path", None) or variable.name
    return str(name).rpartition("/")[2].partition(":")[0]


def statistics(model: Any) -> list[Any]:
    """Return the running statistics of a model's batch-norm layers."""
    return [v for v in _other_variables(model) if is_statistic(v)]


def _other_variables(model: Any) -> list[Any]:
    """Return the variables of a model that are neither weights, frozen ones included, nor random seeds."""
    weights = {id(raw(v)) for layer in model._flatten_layers() for v in layer._trainable_variables}
    others = [v for v in model.non_trainable_variables if id(raw(v)) not in weights and not is_seed(v)]
    return [
        v for v in others if raw(v).dtype not in (tf.string, tf.resource, tf.variant) and raw(v).shape.num_elements()
    ]


BUILD = (
    "Build it before fit(), by model.build(input_shape) or by a call on a batch, model(x); if it has only a "
    "train_step(), each of its networks"
)
"""Hint of errors about models without weights."""
_NO_WEIGHTS = (keras.Layer.build, keras.Model.build)
"""``build()`` of layers that make no weights of their own."""


def is_built(model: Any) -> bool:
    """Return whether a model has all its weights. (Its ``variables`` have seeds of Dropout and metrics before; and
    ``built`` may stay False where ``train_step()`` calls the model's parts.)"""
    lacking = [one for one in model._flatten_layers() if not one.built and type(one).build not in _NO_WEIGHTS]
    return not lacking and (model.built or bool(model.weights))


def build(optimizer: Any, model: Any, variables: Sequence[Any] | None = None) -> None:
    """Build an optimizer if it is not, outside of any graph.

    Args:
        optimizer: a wrapped optimizer.
        model: the model that it trains; None if it is not known.
        variables: variables to build it with; None: the model's.

    Raises:
        ValueError: it is not built, and there is nothing to build it with, or the model has no weights yet.
    """
    if optimizer.built:
        return
    if variables is None and model is None:
        raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
    if variables is None and not is_built(model):
        raise ValueError(f"the model has no weights yet. {BUILD}")
    with tf.init_scope():
        optimizer.build(model.trainable_variables if variables is None else variables)
        optimizer.built = True


def refuse_overwritten(optimizer: Any, action: str) -> None:
    """Raise ValueError if an optimizer trains variables in float8; ``action`` names what is impossible with them."""
    overwritten = [v for v in optimizer._trainable_variables if optimizer._overwrite_variable_with_gradient(v)]
    if overwritten:
        raise ValueError(
            f"{signature(overwritten[0])} is overwritten by its gradient (float8 training), which cannot be {action}: "
            f"use another dtype policy"
        )


def buffers_of(model: Any) -> Buffers:
    """Return the variables of a model besides its weights, by position.

    Without a model there are none, and the rank still takes part in the comparison: another rank may know its model,
    which Keras' callbacks set while it trains.
    """
    variables = [] if model is None else _other_variables(model)
    return Buffers([_KerasBuffer(str(place), v) for place, v in enumerate(variables)], lambda array: array)


class _KerasBuffer(agreement.Buffer):
    """A variable of a Keras model on one rank, identified by position, since names differ between processes."""

    def __init__(self, key: str, variable: Any) -> None:
        self.key, self._variable, self.is_statistic = key, raw(variable), is_statistic(variable)
        self.name = str(getattr(variable, "path", None) or variable.name)
        self.kind = f"{_last_part(variable)} {tuple(variable.shape)} {self._variable.dtype.name}"

    def data(self) -> Array:
        return np.frombuffer(_numpy(self._variable).tobytes(), np.uint8)

    def put_data(self, data: Array) -> None:
        self._assign(np.frombuffer(data.tobytes(), self._variable.dtype.as_numpy_dtype))

    def values(self) -> Array:
        return _numpy(self._variable).reshape(-1).astype(np.float64)

    def put_values(self, values: Array) -> None:
        self._assign(values.astype(self._variable.dtype.as_numpy_dtype))

    def _assign(self, values: Array) -> None:
        with tf.init_scope():
            self._variable.assign(values.reshape(self._variable.shape))


def _numpy(variable: Any) -> Array:
    with tf.init_scope():
        return np.asarray(variable.numpy())


def flat_double(variables: Sequence[Any]) -> Array:
    """Return variables as one new vector, shape (n,), float64."""
    with tf.init_scope():
        return np.concatenate([raw(v).numpy().reshape(-1).astype(np.float64) for v in variables])


class Flat:
    """Variables as one vector; in a graph and eagerly.

    Args:
        variables: at least one, in the same order on all ranks.
        memory: of vectors.

    Raises:
        ValueError: there is no variable, or one in half precision.
    """

    def __init__(self, variables: Sequence[Any], memory: ReusedBlocks) -> None:
        self.variables, self._memory = [raw(v) for v in variables], memory
        if not self.variables:
            raise ValueError("there is nothing to mix: every variable is local, or the model has none to train")
        for variable, given in zip(self.variables, variables, strict=True):
            if variable.dtype not in (tf.float32, tf.float64):
                raise ValueError(
                    f"{signature(given)} cannot be mixed without losing what it learns: keep weights in float32, as "
                    f"the dtype policies 'mixed_float16' and 'mixed_bfloat16' do; compression= makes messages small"
                )
        self.dtype = tf.float64 if any(v.dtype == tf.float64 for v in self.variables) else tf.float32
        self._shared: tf.Tensor | None = None
        """The tensor whose memory the variables share until they are updated."""
        self.sizes = [int(v.shape.num_elements()) for v in self.variables]

    @property
    def elements(self) -> int:
        """Elements of the vector."""
        return sum(self.sizes)

    def joined(self) -> tf.Tensor:
        """Return the variables now as one new tensor, shape (elements,)."""
        return tf.concat([tf.reshape(tf.cast(v, self.dtype), [-1]) for v in self.variables], axis=0)

    def values(self) -> list[tf.Tensor]:
        """Return the variables' values now, in their memory on a CPU."""
        return [v.read_value() for v in self.variables]

    def vector(self, values: Sequence[tf.Tensor]) -> Array:
        """Return values as one new vector, shape (elements,), with room behind it for a message's header. Not in a
        graph."""
        flat = vector_with_room(self.elements, self.dtype.as_numpy_dtype, self._memory)
        np.concatenate([np.asarray(value) for value in values], axis=None, out=flat)
        return flat

    def read(self) -> Array:
        """Return the variables now as one new vector, shape (elements,). Not in a graph."""
        return self.vector(self.values())

    def taken(self, vector: Array) -> tf.Tensor:
        """Return a vector, which the caller transfers, as the tensor to ``write`` next."""
        # (kept, since TensorFlow updates the last variable in place that holds an array's memory)
        self._shared = given_to_tensor(vector)
        return self._shared

    def write(self, vector: Any) -> None:
        """Assign a vector to the variables: an array, which the caller transfers, or a tensor."""
        tensor = self.taken(vector) if isinstance(vector, np.ndarray) else vector
        for variable, part in self._with_parts(tensor):
            variable.assign(part)

    def add(self, vector: tf.Tensor, indices: Collection[int] | None = None) -> None:
        """Add a vector to the variables, or to those of these indices only."""
        for index, (variable, part) in enumerate(self._with_parts(vector)):
            if indices is None or index in indices:
                variable.assign_add(part)

    def _with_parts(self, vector: tf.Tensor) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
        """Yield each variable and its part of a vector."""
        flat = tf.ensure_shape(tf.convert_to_tensor(vector, self.dtype), [self.elements])
        starts = itertools.accumulate(self.sizes, initial=0)
        for variable, start, size in zip(self.variables, starts, self.sizes, strict=False):
            # (a slice shares the vector's memory where it begins and ends on 64 bytes; tf.split would copy it)
            yield variable, tf.cast(tf.reshape(tf.slice(flat, [start], [size]), variable.shape), variable.dtype)

    def scale(self, factor: tf.Tensor) -> None:
        """Multiply the variables."""
        for variable in self.variables:
            variable.assign(variable * tf.cast(factor, variable.dtype))
