"""Averages over all active ranks: of weights, and of differences to an anchor.

If messages are exact, an average is an allreduce. Otherwise it takes two stages, each an ``alltoall``. A vector is cut
into as many parts as there are ranks. Each rank sends its part j to rank j, which adds up the parts that it receives,
in the order of the ranks, and sends the mean of part j to all ranks. That moves as many elements as an allreduce, and
all ranks decode the same bytes, so results are the same to the bit. The compression error of either stage is added to
the next vector that this rank contributes (error feedback). On a finished rank, the error of means is added to the next
mean of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hvd_async.algorithms.gossip.config import AverageEntered, StartAverage
from hvd_async.algorithms.gossip.message_format import HEADER, MessageFormat
from hvd_async.runtime.carrier import Carrier, Collective
from hvd_async.runtime.interfaces import Handle, RankRuntime, Rows, Vector


class Average(NamedTuple):
    """A completed average: the mean of the vectors, the means of the numbers sent with them, and the set of parameters
    that a rank has moved (``outer.packed``)."""

    mean: Vector
    numbers: list[float]
    moved: bytes = b""


class Averages:
    """Averages of fragments of a vector over all active ranks; several may be in flight.

    Args:
        engine: the engine of this rank.
        post: the format of messages; a message holds one of ``fragments`` x ranks parts of the vector.
        fragments: number of fragments of the vector, of equal length except the last; each is averaged separately.
        blocking: whether ranks wait for each average that they enter. Messages are exact then, and this rank keeps no
            results of other averages.

    Attributes:
        error: compression error that no message has carried yet, shape (n,) (engine thread). Empty if messages are
            exact, here and in the run that this one continues. Exact messages leave an earlier run's error to the
            drain.
        newest: the number of the last average that has completed here since a drain or cut.
        bytes_sent: bytes sent to other ranks.
    """

    def __init__(self, engine: RankRuntime, post: MessageFormat, fragments: int = 1, blocking: bool = False) -> None:
        self._engine, self._post, self._fragments, self._blocking = engine, post, fragments, blocking
        self._exact = blocking or post.lossless
        ranks = post.members or tuple(range(engine.size))
        self._place, self._size = ranks.index(engine.rank), len(ranks)
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._elements = len(post.zeros())
        self.error: Vector = post.zeros()[: 0 if self._exact else self._elements] + 0
        self._part = -(-self._elements // (fragments * self._size))
        self._contributed: dict[int, Vector] = {}
        """This rank's vectors for averages that have not started yet (engine thread)."""
        self._carrier = Carrier(engine)
        self._parts_here: dict[int, dict[int, Vector]] = {}
        """Received parts, by average and place, until the second stage begins."""
        self._results: dict[int, Average] = {}
        self._first, self.newest = 0, -1
        """The number of the first average after the last drain or cut."""
        self._discards = False
        self.bytes_sent = 0

    def slice_of(self, fragment: int) -> slice:
        """Return the elements of a fragment."""
        length = self._part * self._size
        return slice(min(fragment * length, self._elements), min((fragment + 1) * length, self._elements))

    def _own_part(self, fragment: int) -> slice:
        """Return the elements of a fragment that this rank adds up."""
        whole = self.slice_of(fragment)
        start = min(whole.start + self._place * self._part, whole.stop)
        return slice(start, min(start + self._part, whole.stop))

    # -- training thread --------------------------------------------------------------------------------------

    def contribute(
        self, optimizer: int, average: int, fragment: int, vector: Vector, numbers: list[float], moved: bytes = b""
    ) -> None:
        """Enter the next average with a fragment's vector, taking ownership of it, numbers, and the set of parameters
        that this rank has moved."""
        index = average - self._first + 1
        self._post.mark(vector)

        def send() -> None:
            self._contributed[index] = vector
            self._engine.send(AverageEntered(optimizer, index, numbers, fragment, moved))

        self._engine.call_soon(send)

    def is_complete(self, average: int) -> bool:
        """Return whether ``take`` has a result."""
        return average in self._results

    @property
    def idle(self) -> bool:
        """Whether no average is in flight here."""
        return self._carrier.is_idle

    def take(self, average: int) -> Average:
        """Return a result and forget it."""
        return self._results.pop(average)

    def results(self) -> dict[int, Average]:
        """Return the results that were not taken yet."""
        return dict(self._results)

    def corrected(self, weights: Vector) -> Vector:
        """Return a rank's weights corrected by its compression error."""
        return weights - self.error if len(self.error) else weights

    def restart(self, first: int) -> None:
        """Count from ``first`` on, at a drain or cut."""
        self._first, self.newest = first, first - 1

    def restore(self, error: Vector, results: dict[int, Average], first: int) -> None:
        """Continue with an earlier run's error and results; its compression may have been a different one."""
        if len(error):
            self.error = error
        self._results, self._first, self.newest = dict(results), first, first - 1

    def discard(self) -> None:
        """Drop results from now on; this rank's engine still adds up its part for the other ranks."""
        self._discards = True

    # -- engine thread ----------------------------------------------------------------------------------------

    def submit(self, command: StartAverage) -> None:
        """Send this rank's parts, or nothing if it has finished, and add up its own part for all ranks."""
        own = self._contributed.pop(command.index, None)
        own = own if self._engine.rank in command.ranks else None  # its optimizer may have been deleted meanwhile
        if self._exact:
            self._reduce(command, own)
            return
        if self._size == 1:
            assert own is not None
            self._complete(command, own)
            return
        senders = sorted(self._places[rank] for rank in command.ranks if rank != self._engine.rank)

        def send_parts() -> Collective:
            parts, messages = ([], []) if own is None else self._encoded(command.part, own)

            def settled(received: Rows) -> None:
                by_place = self._unpacked(received, senders)
                if own is not None:
                    by_place[self._place] = parts[self._place]
                self._parts_here[command.index] = by_place

            return self._exchange(command, "parts", messages, senders, settled)

        def send_means() -> Collective:
            return self._send_mean(command, self._mean(command, self._parts_here.pop(command.index)))

        # Second stages begin in the order of the commands, independently of the order in which first stages complete.
        carry, name = self._carrier.carry, partial(self._name, command)
        carry("parts", command.index, name("parts"), send_parts)
        carry("means", command.index, name("means"), send_means, lambda: command.index in self._parts_here)

    def _reduce(self, command: StartAverage, own: Vector | None) -> None:
        vector = self._post.zeros()[self.slice_of(command.part)] if own is None else own
        self.bytes_sent += 2 * (self._size - 1) * self._post.nbytes
        name, process_set = self._name(command, "sum"), self._post.process_set

        def start() -> Handle:
            return self._engine.collectives.allreduce_sum(vector, name, process_set, keep=own is None)

        def settled(total: Vector) -> None:
            if own is not None or not self._blocking:
                self._complete(command, total * (1.0 / len(command.ranks)))

        self._carrier.carry("sum", command.index, name, lambda: Collective(start, settled))

    def _name(self, command: StartAverage, stage: str) -> str:
        """Return a collective's name. Names are reused after 2 x ``fragments`` averages: no rank is ahead of another by
        more than ``fragments``."""
        return f"hvd_async.average.{command.optimizer}.{stage}.{command.index % (2 * self._fragments)}"

    def _encoded(self, fragment: int, vector: Vector) -> tuple[list[Vector], list[tuple[int, Vector]]]:
        """Return a fragment's parts, corrected by the compression error, and the messages to other places."""
        post, where = self._post, self.slice_of(fragment)
        parts = self._parts(vector + self.error[where])
        messages = [(place, post.encode(part)) for place, part in enumerate(parts) if place != self._place]
        left = [part * 0.0 for part in parts]  # (this rank's own part is not sent)
        for place, data in messages:
            left[place] = parts[place] - post.decode(data)
        self.error[where] = post.concatenate(left)[: where.stop - where.start]
        return parts, messages

    def _parts(self, vector: Vector) -> list[Vector]:
        """Return a fragment in parts of equal length, the last padded with zeros."""
        length = self._part * self._size
        if len(vector) < length:
            zeros = [self._post.zeros()] * -(-(length - len(vector)) // self._elements)
            vector = self._post.concatenate([vector, *zeros])
        return [vector[at : at + self._part] for at in range(0, length, self._part)]

    def _mean(self, command: StartAverage, by_place: dict[int, Vector]) -> Vector:
        """Return the mean of this rank's part, added up in the order of the ranks."""
        first, *others = (by_place[self._places[rank]] for rank in command.ranks)
        total = first + 0
        for part in others:
            total = total + part
        if self._engine.rank not in command.ranks:  # (otherwise the error is in its own part)
            where = self._own_part(command.part)
            total[: where.stop - where.start] += self.error[where]
            self.error[where] = 0.0
        return total * (1.0 / len(command.ranks))

    def _send_mean(self, command: StartAverage, mean: Vector) -> Collective:
        post, place = self._post, self._place
        data = post.encode(mean)
        decoded = post.decode(data)
        own = self._own_part(command.part)
        left = (mean - decoded) * float(len(command.ranks))  # error of the sum, not of the mean
        self.error[own] += left[: own.stop - own.start]

        others = [other for other in range(self._size) if other != place]

        def settled(received: Rows) -> None:
            by_place = self._unpacked(received, others) | {place: decoded}
            where = self.slice_of(command.part)
            whole = post.concatenate([by_place[one] for one in range(self._size)])
            self._complete(command, whole[: where.stop - where.start])

        return self._exchange(command, "means", [(other, data) for other in others], others, settled)

    def _exchange(
        self,
        command: StartAverage,
        stage: str,
        messages: Sequence[tuple[int, Vector]],
        senders: list[int],
        settled: Callable[[Rows], None],
    ) -> Collective:
        """Return a stage: ``messages`` to places in ascending order, and one message from each of ``senders``."""
        post, receivers = self._post, {place for place, _ in messages}
        splits, coming = ([int(place in ends) for place in range(self._size)] for ends in (receivers, senders))
        header = HEADER.pack(command.index, 0.0)
        rows = post.pack([(data, header) for _, data in messages])
        self.bytes_sent += len(messages) * (post.nbytes + HEADER.size)
        name = self._name(command, stage)

        def start() -> Handle:
            return self._engine.collectives.alltoall(rows, splits, coming, name, post.process_set)

        return Collective(start, settled)

    def _unpacked(self, rows: Rows, senders: list[int]) -> dict[int, Vector]:
        """Return the received vectors by the sender's place; ``senders`` are in ascending order."""
        return {place: self._post.decode(self._post.unpack(row)[0]) for place, row in zip(senders, rows, strict=True)}

    def _complete(self, command: StartAverage, mean: Vector) -> None:
        with self._engine.changed:
            if not self._discards:
                numbers = [weight / len(command.ranks) for weight in command.weights]
                average = self._first + command.index - 1
                self._results[average] = Average(mean, numbers, command.moved)
                self.newest = max(self.newest, average)
            self._engine.changed.notify_all()
