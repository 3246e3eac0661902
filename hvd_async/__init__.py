"""Horovod optimizers that do not wait for stragglers.

``EagerOptimizer(opt)``, ``GossipOptimizer(opt)`` and ``LeaderOptimizer(opt)`` hand over to ``hvd_async.torch`` or
``hvd_async.tensorflow``, whichever ``opt`` belongs to; only that framework is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"


def _framework(optimizer: Any) -> str:
    """The binding an optimizer belongs to, told from the modules of its classes, without importing a framework.

    Raises:
        ValueError: it is no torch and no Keras optimizer.
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
    """The ``EagerOptimizer`` of ``hvd_async.torch`` or ``hvd_async.tensorflow``, by the optimizer's framework.

    Raises:
        ValueError: the optimizer is of no known framework, or as the binding's wrapper says.
    """
    binding = importlib.import_module(f"hvd_async.{_framework(optimizer)}")
    return binding.EagerOptimizer(optimizer, *args, **kwargs)


def GossipOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  named like a class, as Horovod's
    """The ``GossipOptimizer`` of ``hvd_async.torch`` or ``hvd_async.tensorflow``, by the optimizer's framework.

    Raises:
        ValueError: the optimizer is of no known framework, or as the binding's wrapper says.
    """
    binding = importlib.import_module(f"hvd_async.{_framework(optimizer)}")
    return binding.GossipOptimizer(optimizer, *args, **kwargs)


def LeaderOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  named like a class, as Horovod's
    """The ``LeaderOptimizer`` of ``hvd_async.torch`` or ``hvd_async.tensorflow``, by the optimizer's framework.

    Raises:
        ValueError: the optimizer is of no known framework, or as the binding's wrapper says.
    """
    binding = importlib.import_module(f"hvd_async.{_framework(optimizer)}")
    return binding.LeaderOptimizer(optimizer, *args, **kwargs)


def Monitor(optimizer: Any, **options: Any) -> Any:  # noqa: N802  named like the class that it makes one of
    """A live view of one of these optimizers, of any framework; options are those of ``hvd_async.monitor.Monitor``.

    Raises:
        ValueError: the optimizer is not wrapped, or as the class says.
    """
    return importlib.import_module(f"{__name__}.monitor").Monitor(optimizer, **options)


__all__ = ["EagerOptimizer", "GossipOptimizer", "LeaderOptimizer", "Monitor", "__version__"]
