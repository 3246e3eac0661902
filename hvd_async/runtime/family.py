"""Families and algorithms as the rest of the library sees them: the runtime is given tables of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hvd_async.runtime.messages import Config, OptimizerCommand, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine


@dataclass(frozen=True)
class Family:
    """One family of algorithms: its messages and its state machine.

    Attributes:
        name: "eager", "gossip", "leader".
        config: what all ranks of its optimizers must have in common.
        events: its own, from rank to coordinator.
        commands: its own, from coordinator to rank.
        state_machine: what the coordinator runs for one optimizer.
        details: the family's own content of ``Drained``; None if there is none.
    """

    name: str
    config: type[Config]
    events: tuple[type[OptimizerEvent], ...]
    commands: tuple[type[OptimizerCommand], ...]
    state_machine: type[StateMachine[Any]]
    details: type[msgspec.Struct] | None = None


@dataclass(frozen=True)
class Algorithm:
    """One algorithm, as data; a family may add fields of its own.

    Attributes:
        name: "sgp".
        family: the name of its family.
        options: its own options and their defaults; all others are refused.
        sends: what ranks send each other.
        waits_for: whom a step waits for; "period" stands for all ranks, after so many steps and not after each.
        symmetric_graph: whether both ends of each edge of its graph must send.
        about: what sets it apart, for people: a clause that its name begins.
        compressions: how messages may travel.
    """

    name: str
    family: str
    options: Mapping[str, Any]
    sends: Literal["gradients", "weights"]
    waits_for: Literal["all", "quorum", "neighbours", "nobody", "period"]
    symmetric_graph: bool = False
    about: str = ""
    compressions: tuple[str, ...] = ("none",)
