"""The base of both frameworks' trainers; rank 0's checkpoint is read once and sent to all, or its error is."""

from __future__ import annotations

import abc
import contextlib
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .batches import Batch
from .metrics import OptimizerCounts, Replicas
from .options import Options
from .position import Position

HINT = "remove it, or start without --resume"


@dataclass(frozen=True)
class World:
    """The job as the loop sees it. `gather(value, name)` is a collective: every rank's value, in order of rank."""

    rank: int
    size: int
    gather: Callable[[Any, str], list[Any]]


class Trainer(abc.ABC):
    """A model with its optimizer, in some framework.

    checkpoint_suffix: of its files. opening: a notice for people before the first step, if that takes long.
    optimizer: the wrapped one, of the algorithm of `options`. skipped: steps on this rank that were skipped, as they
    overflowed. watch: called after each step, where somebody watches.
    """

    checkpoint_suffix: ClassVar[str]
    opening: ClassVar[str | None] = None
    optimizer: Any
    watch: Callable[[], None] | None = None

    def __init__(self, options: Options) -> None:
        self.options, self.skipped = options, 0

    # -- what a framework supplies ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def train_step(self, batch: Batch, rate: float) -> float:
        """One optimizer step on this rank at this learning rate; returns the batch's mean loss."""

    @abc.abstractmethod
    def correct(self, batch: Batch) -> int:
        """How many images of the batch are classified correctly, in inference mode."""

    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """Collective: compare the ranks' weights."""

    @abc.abstractmethod
    def made_by(self) -> object:
        """Return what a checkpoint must agree on with the run that goes on from it."""

    @abc.abstractmethod
    def save(self, path: Path, position: Position) -> None:
        """Write a complete checkpoint. Called on rank 0 only, after a drain."""

    @abc.abstractmethod
    def read(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's content by name, what `made_by` was under that name. Called on rank 0 only."""

    @abc.abstractmethod
    def load(self, content: dict[str, Any]) -> Position:
        """Put a checkpoint's content where it belongs; returns how far its run had come."""

    # -- what the wrapped optimizer does in any framework -------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen since the optimizer was made; of gossip, exchanges and
        averages; of leaders, pulls."""
        return int(self.optimizer.rounds)

    def begin_epoch(self, epoch: int) -> None:
        """Collective: no rank has taken a step of this epoch yet; gossip with its peers and algorithm."""
        if self.options.gossips:
            self.optimizer.set_epoch(epoch)

    def drain(self) -> None:
        """Collective: every gradient is applied on every rank, batch-norm statistics agree, and collectives of others
        may follow."""
        self.optimizer.drain()

    def consensus(self) -> AbstractContextManager[None]:
        """Collective: in it the model is what `drain` would make it, and collectives of others may follow."""
        context: AbstractContextManager[None] = self.optimizer.consensus()
        return context

    def consensus_distance(self) -> float | None:
        """Collective: how far the ranks' weights are from their average now; None if they have none of their own."""
        return float(self.optimizer.consensus_distance()) if self.options.apart else None

    def outcome(self) -> OptimizerCounts:
        """Return the counts of this rank's optimizer."""
        if self.options.gossips:
            return OptimizerCounts.of_gossip(self.optimizer.stats(), self.skipped)
        if self.options.follows:
            return OptimizerCounts.of_leader(self.optimizer.stats(), self.skipped)
        return OptimizerCounts.of(self.optimizer.stats())

    def restore(self, path: Path, world: World) -> Position | None:
        """Collective: load rank 0's file into every rank; None if rank 0 has none.

        Raises ValueError, on every rank, if the file is damaged, is no checkpoint, or one of a run with other options;
        and where it does not hold what this run needs.
        """
        found = _read(path, self) if world.rank == 0 and path.exists() else None
        # Errors travel too: a rank that raised alone would leave the others waiting. The others have nothing to gather.
        content: dict[str, Any] | str | None = world.gather(found, "runner.checkpoint")[0]
        if content is None:
            return None
        if isinstance(content, str):
            raise ValueError(content)
        try:
            return self.load(content)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not hold what this run needs ({type(error).__name__}: {error}): {HINT}"
            ) from error


def _read(path: Path, trainer: Trainer) -> dict[str, Any] | str:
    """The content, or what is wrong with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # (which frameworks do not look at when they load)
        content = trainer.read(path)
    except Exception as error:  # noqa: BLE001  whatever a reader makes of damaged bytes
        return f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}): {HINT}"
    if damaged is not None:
        return f"{path} is damaged, its part {damaged} has a wrong checksum: {HINT}"
    if not isinstance(content, dict):
        return f"{path} is no checkpoint, it holds a {type(content).__name__}: {HINT}"
    made_by = trainer.made_by()
    if content.get("made_by") != made_by:
        return (
            f"{path} was written by a run with {content.get('made_by')}, this one has {made_by}: give the same "
            f"options, or another --checkpoint-dir"
        )
    return content


@contextlib.contextmanager
def errors_reported(world: World) -> Iterator[None]:
    """Where the user's options or files are at fault: the message without a traceback, and status 2."""
    try:
        yield
    except ValueError as error:
        # Every rank says it: the launcher kills the others as soon as one has ended.
        print(f"error (rank {world.rank}): {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
