"""State of rounds as rank 0 keeps it: by bucket, by round, by rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_async.algorithms.eager.hosts import Gathering
from hvd_async.algorithms.eager.quorum import Quorum
from hvd_async.runtime.messages import Hyper


@dataclass
class Bucket:
    """Where one bucket stands: rounds fired, each rank's position, who is in for the next round."""

    position: dict[int, int]
    gathering: Gathering
    fired: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    """Ranks that have arrived for round fired + 1, in order, and when."""
    quorum_at: float | None = None
    """When the next round's quorum came together (grace counts from there)."""
    wake_at: float | None = None
    """When its grace ends, while it is all that holds the round back."""
    loaded: bool = False
    """Whether a gradient was handed over since the last round took what was pending."""
    landed: int = 0
    """Rounds that are known to have come back to some rank; they come back to all at much the same time."""
    fired_at: float = 0.0
    """When the last round fired."""
    called: int = 0
    """The number of the first roll call since then; 0 before there was one."""
    answered: set[int] = field(default_factory=set)
    """The ranks whose engines have submitted that round, as the roll call has shown."""


@dataclass
class Round:
    """State of a round, over all its buckets, from its first arrival until its hyperparameters are set."""

    quorum: Quorum
    why: str
    """Why this quorum, where it was chosen by itself."""
    hyper: Hyper | None = None


@dataclass(frozen=True)
class InStep:
    """A rank's last ``StepEntered``."""

    step: int
    hyper: Hyper
    at: float
