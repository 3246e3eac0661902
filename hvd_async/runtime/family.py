"""A family of algorithms to the runtime, which is given a table of them: its messages and its state machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.runtime.messages import Config, OptimizerCommand, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: "eager", "gossip", "leader".
        config: what all ranks of its optimizers must have in common.
        events: its own, from rank to coordinator.
        commands: its own, from coordinator to rank.
        state_machine: what the coordinator runs for one optimizer.
        details: what ``Drained`` brings of it; None if nothing.
    """

    name: str
    config: type[Config]
    events: tuple[type[OptimizerEvent], ...]
    commands: tuple[type[OptimizerCommand], ...]
    state_machine: type[StateMachine[Any]]
    details: type[msgspec.Struct] | None = None
