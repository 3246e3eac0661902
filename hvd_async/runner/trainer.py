"""Base of both frameworks' trainers, and their view of the job."""

from __future__ import annotations

import abc
import contextlib
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from .course import Position
from .data import Batch
from .options import Options
from .report import OptimizerCounts, Replicas

HINT = "remove it, or start without --resume"


class World(NamedTuple):
    """Job of this rank; ``gather(value, name)`` is a collective that returns every rank's value, in rank order."""

    rank: int
    size: int
    gather: Callable[[Any, str], list[Any]]


class Trainer(abc.ABC):
    """Model with its optimizer, in some framework.

    Attributes:
        checkpoint_suffix: of its files.
        opening: notice before the first step, if that is slow.
        optimizer: of the algorithm in ``options``, wrapped.
        skipped: steps of this rank that overflowed.
    """

    checkpoint_suffix: ClassVar[str]
    opening: ClassVar[str | None] = None
    optimizer: Any

    def __init__(self, options: Options) -> None:
        self.options, self.skipped = options, 0

    # -- what a framework supplies -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def train_step(self, batch: Batch, rate: float) -> float:
        """Take one optimizer step on this rank at this learning rate; return the batch's mean loss."""

    @abc.abstractmethod
    def correct(self, batch: Batch) -> int:
        """Return the number of images that are classified correctly, in inference mode."""

    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """Compare the ranks' weights. A collective."""

    @abc.abstractmethod
    def fingerprint(self) -> object:
        """Return the settings that a checkpoint and the run that resumes it must have in common."""

    @abc.abstractmethod
    def save(self, path: Path, position: Position) -> None:
        """Write a complete checkpoint. Called on rank 0 only, after a drain."""

    @abc.abstractmethod
    def read(self, path: Path) -> dict[str, Any]:
        """Return the content of a checkpoint, the fingerprint as ``made_by``. Called on rank 0 only."""

    @abc.abstractmethod
    def load(self, content: dict[str, Any]) -> Position:
        """Load the content of a checkpoint; return its position."""

    # -- what the wrapped optimizer does in any framework --------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen; with gossip, exchanges and averages; with leaders, pulls."""
        return int(self.optimizer.rounds)

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch, with its peers and algorithm. A collective."""
        if self.options.gossips:
            self.optimizer.set_epoch(epoch)

    def drain(self) -> None:
        """Apply every gradient on every rank and make batch-norm statistics agree. A collective."""
        self.optimizer.drain()

    def consensus(self) -> AbstractContextManager[None]:
        """Return a context in which the model is what ``drain`` would make it. A collective."""
        context: AbstractContextManager[None] = self.optimizer.consensus()
        return context

    def consensus_distance(self) -> float | None:
        """Return the distance of the ranks' weights; None if they have none of their own. A collective."""
        return float(self.optimizer.consensus_distance()) if self.options.has_own_weights else None

    def counts(self) -> OptimizerCounts:
        """Return the counts of this rank's optimizer."""
        return OptimizerCounts.of(self.optimizer.stats(), self.skipped)

    def restore(self, path: Path, world: World) -> Position | None:
        """Load rank 0's checkpoint on every rank; return None if there is none. A collective.

        Raises:
            ValueError: on every rank, if it is damaged, is not a checkpoint, or does not fit this run.
        """
        # An error is broadcast too: if only one rank raised it, the others would wait forever.
        found = self._content_or_error(path) if world.rank == 0 and path.exists() else None
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

    def _content_or_error(self, path: Path) -> dict[str, Any] | str:
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # (frameworks do not check this)
            content = self.read(path)
        except Exception as error:  # noqa: BLE001  (readers raise anything on damaged bytes)
            return f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}): {HINT}"
        if damaged is not None:
            return f"{path} is damaged, its part {damaged} has a wrong checksum: {HINT}"
        if not isinstance(content, dict):
            return f"{path} must be a checkpoint, got a {type(content).__name__}: {HINT}"
        if content.get("made_by") != self.fingerprint():
            return (
                f"{path} was written by a run with {content.get('made_by')}, this one has {self.fingerprint()}: give "
                "the same options, or another --checkpoint-dir"
            )
        return content


@contextlib.contextmanager
def errors_reported(world: World) -> Iterator[None]:
    """Print errors in the user's options or files without a traceback, and end the process with status 2."""
    try:
        yield
    except ValueError as error:
        # On every rank: the launcher kills the others as soon as one has ended.
        print(f"error (rank {world.rank}): {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
