"""``hvd.elastic`` for torch: Horovod's idiom, and survivors that continue from where they are.

``run`` and ``ElasticSampler`` are Horovod's. ``TorchState`` replaces Horovod's, whose ``restore()`` goes back to the
last commit. This one never goes back, since every survivor has weights from which the others can continue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from hvd_async.optimizers import elastic
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.interfaces import Handle
from hvd_async.torch import hyperparameters, objects
from hvd_async.torch.collectives import LIFECYCLE, plane_collectives
from hvd_async.torch.functions import receive_state
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.tensor_collectives import FINEST_POLL
from hvd_async.torch.tensors import bytes_of, from_bytes, is_plain, write

if not hvd.on_horovod:
    from hvd_async.torch.distributed.elastic import NOT_HERE

    raise ImportError(f"{NOT_HERE} (The data plane is torch.distributed, because {hvd.plane.reason}.)")

from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, run

__all__ = ["ElasticSampler", "TorchState", "run"]
EXTRA_STATE = "_extra_state"
"""Last part of the names under which torch saves what ``get_extra_state()`` returns."""


class TorchState(elastic.WithoutRollBack, ObjectState):
    """Models, optimizers, samplers and other attributes with which ranks continue when others are lost or join.

    Nothing is rolled back. Survivors keep their weights, or take those of the survivor that has seen the most rounds;
    gradients that no round has carried stay pending; new ranks get weights, optimizer state and buffers of a survivor.
    All ranks take the other attributes, such as the positions of samplers and schedules, and with them the
    hyperparameters (learning rates, momentum), from the rank that has ended the most steps: so change them right after
    ``optimizer.step()``. A new rank gets the settings in force: those of ``switch()``, ``set_epoch()`` and
    ``set_backward_passes_per_step()``.

    Args:
        model: a module.
        optimizer: an optimizer that this library has wrapped.
        kwargs: more models and optimizers, samplers (``ElasticSampler``), and objects with ``state_dict()`` and
            ``load_state_dict()``, such as learning rate schedules; anything else must be picklable. All become
            attributes.
    """

    _interrupt = HostsUpdatedInterrupt

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        LIFECYCLE.elastic = True
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._models = [value for value in given.values() if isinstance(value, torch.nn.Module)]
        self._optimizers = [value for value in given.values() if isinstance(value, OptimizerMethods)]
        known = {id(value) for value in (*self._models, *self._optimizers)}
        self._stateful = {
            name: value
            for name, value in given.items()
            if id(value) not in known and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        }
        known |= {id(value) for value in self._stateful.values()}
        self._lifecycle, self._survivor = LIFECYCLE, False
        self._saved_state: dict[str, Any] = {}
        for name, value in given.items():
            if id(value) in known:
                setattr(self, name, value)
        plain = {name: value for name, value in given.items() if id(value) not in known}
        super().__init__(
            bcast_object=lambda value: _Exchange().object_of(0, value, "hvd_async.elastic.commit"),
            get_rank=hvd.rank,
            **plain,
        )

    def sync(self) -> None:
        """Agree with the present ranks on the state to continue from. A collective.

        Raises:
            ReplicaStateError: the ranks' states do not match, or no rank has weights to continue from.
        """
        exchange = _Exchange()
        ours = {id(p) for optimizer in self._optimizers for p in exchange.weights(optimizer)}
        held = [one for model in self._models for one in model.state_dict(keep_vars=True).items()]
        tensors = [value for name, value in held if isinstance(value, torch.Tensor) and not _is_extra(name)]
        others = [tensor for tensor in tensors if id(tensor) not in ours and is_plain(tensor)]
        extra = [
            {name: value for name, value in model.state_dict().items() if _is_extra(name)} for model in self._models
        ]
        own = {name: getattr(self, name) for name in self._saved_state}
        states = {name: value.state_dict() for name, value in self._stateful.items()}
        given = (own, states, extra)
        (own, states, extra), take = elastic.sync(exchange, self._survivor, self._optimizers, others, given)
        take()
        if not self._survivor:  # (what get_extra_state() returns is the model's own, as its buffers are)
            for model, values in zip(self._models, extra, strict=True):
                if values:
                    model.load_state_dict(values, strict=False)
        self._saved_state = own
        self._set_attrs()
        for name, state in states.items():
            self._stateful[name].load_state_dict(state)
        self._survivor = True

    def _ours(self) -> list[Any]:
        return self._optimizers


def _is_extra(name: str) -> bool:
    """Return whether an entry of a module's ``state_dict()`` is its extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


class _Exchange(elastic.Exchange):
    """Collectives that send one rank's torch tensors to others.

    They sleep while they wait. Horovod's own poll without a pause: where ranks share cores, this keeps the threads that
    they wait for from running, sometimes for many seconds.
    """

    def __init__(self) -> None:
        self._collectives = plane_collectives()()
        self.rank, self.size = self._collectives.rank, self._collectives.size

    def everyones(self, value: Any, name: str) -> list[Any]:
        packed = self._collectives.allgather_bytes(objects.pack(value), name)
        return [objects.unpack(data, rank) for rank, data in enumerate(packed)]

    def object_of(self, root: int, value: Any, name: str) -> Any:
        return self.everyones(value if self.rank == root else None, name)[root]

    def tensors_of(self, root: int, tensors: Sequence[Any], name: str) -> list[Any]:
        copies = [bytes_of(tensor) for tensor in tensors]  # (Horovod does not carry all dtypes)
        handles = [self._collectives.broadcast(copy, root, f"{name}.{place}") for place, copy in enumerate(copies)]
        return [from_bytes(_result(handle), tensor) for handle, tensor in zip(handles, tensors, strict=True)]

    def vector_of(self, root: int, vector: torch.Tensor, name: str) -> torch.Tensor:
        (received,) = self.tensors_of(root, [vector], name)
        return received

    def put(self, tensors: Sequence[Any], values: Sequence[Any]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            write(tensor, value)

    def weights(self, optimizer: Any) -> list[Any]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def state_of(self, root: int, optimizer: Any, name: str) -> Any:
        return receive_state(optimizer, self.rank, root, name, self.object_of, self.tensors_of)

    def placed(self, optimizer: Any, share: dict[str, Any]) -> dict[str, Any]:
        placed: dict[str, Any] = optimizer._async.replica.placed(share)
        return placed

    def put_state(self, optimizer: Any, state: Any) -> None:
        optimizer.load_state_dict(state)

    def hyperparameters(self, optimizer: Any) -> Any:
        return hyperparameters.read(optimizer.param_groups, optimizer._async.replica.counters)

    def put_hyperparameters(self, optimizer: Any, values: Any) -> None:
        hyperparameters.write(optimizer.param_groups, values)


def _result(handle: Handle) -> torch.Tensor:
    while not handle.done():
        time.sleep(handle.seconds_to_poll() or FINEST_POLL)
    result: torch.Tensor = handle.result()
    return result
