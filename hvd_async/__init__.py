"""Distributed optimizers that do not wait for stragglers.

``EagerOptimizer(opt)``, ``GossipOptimizer(opt)`` and ``LeaderOptimizer(opt)`` forward to ``hvd_async.torch`` or
``hvd_async.tensorflow``, depending on the framework of ``opt``; only that framework is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"


def _framework(optimizer: Any) -> str:
    """Return the framework of an optimizer, from the modules of its classes; imports no framework.

    Raises:
        ValueError: it is neither a torch nor a Keras optimizer.
    """
    for base in type(optimizer).__mro__:
        package = base.__module__.partition(".")[0]
        if package == "torch":
            return "torch"
        if package in ("keras", "tensorflow", "tf_keras"):
            return "tensorflow"
    raise ValueError(
        f"{type(optimizer).__name__} is neither a torch.optim.Optimizer nor a Keras optimizer: pass one, as in "
        f"EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) or EagerOptimizer(keras.optimizers.SGD(0.1))"
    )


def EagerOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  named like a class, as Horovod's
    """Return the ``EagerOptimizer`` of ``hvd_async.torch`` or ``hvd_async.tensorflow``, by the optimizer's framework.

    Raises:
        ValueError: the framework of the optimizer is unknown, or see the wrapper of the binding.
    """
    binding = importlib.import_module(f"hvd_async.{_framework(optimizer)}")
    return binding.EagerOptimizer(optimizer, *args, **kwargs)


def GossipOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  named like a class, as Horovod's
    """Return the ``GossipOptimizer`` of ``hvd_async.torch`` or ``hvd_async.tensorflow``, by the optimizer's framework.

    Raises:
        ValueError: the framework of the optimizer is unknown, or see the wrapper of the binding.
    """
    binding = importlib.import_module(f"hvd_async.{_framework(optimizer)}")
    return binding.GossipOptimizer(optimizer, *args, **kwargs)


def LeaderOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  named like a class, as Horovod's
    """Return the ``LeaderOptimizer`` of ``hvd_async.torch`` or ``hvd_async.tensorflow``, by the optimizer's framework.

    Raises:
        ValueError: the framework of the optimizer is unknown, or see the wrapper of the binding.
    """
    binding = importlib.import_module(f"hvd_async.{_framework(optimizer)}")
    return binding.LeaderOptimizer(optimizer, *args, **kwargs)


def Monitor(optimizer: Any, **options: Any) -> Any:  # noqa: N802  named like the class of its result
    """Return a live view of a wrapped optimizer of any framework.

    Args:
        optimizer: the wrapped optimizer.
        options: see ``hvd_async.monitor.Monitor``.

    Raises:
        ValueError: the optimizer is not wrapped, or see the class.
    """
    return importlib.import_module(f"{__name__}.monitor").Monitor(optimizer, **options)


__all__ = ["EagerOptimizer", "GossipOptimizer", "LeaderOptimizer", "Monitor", "__version__"]
