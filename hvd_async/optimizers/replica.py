"""A replica: the model and the wrapped optimizer of a rank, as its driver sees them. A binding supplies it.

It reads, writes and describes; it decides nothing, waits for nobody by itself and keeps no algorithm's state.
"""

from __future__ import annotations

import abc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hvd_async.algorithms.gossip.message_format import MessageFormat
from hvd_async.algorithms.leader.rank import Statistics
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.interfaces import RankRuntime, Vector
from hvd_async.runtime.log import users_line
from hvd_async.runtime.process_sets import RankGroup

STALE = (
    "this step was traced, as a tf.function, before ranks were lost or joined, and is of no use among those of now: "
    "make the tf.function in the function that hvd.elastic.run decorates"
)


def warn_of_open_passes(
    done: int, passes: int, outcome: str = "stay on this rank and go on with its next ones"
) -> None:
    """Warn that a drain leaves backward passes of a step that has not ended, if there are any.

    Args:
        done: number of these passes.
        passes: backward passes per step.
        outcome: what becomes of their gradients.
    """
    if done:
        warnings.warn(
            f"drain(): {done} backward pass(es) short of a step of {passes} (backward_passes_per_step) {outcome}",
            stacklevel=users_line(),
        )


class Replica(abc.ABC):
    """The replica of any wrapped optimizer. It does not keep its optimizer alive, which holds it by its driver."""

    _reference: Callable[[], Any] = staticmethod(lambda: None)
    _stale = False

    def attach(self, optimizer: Any) -> None:
        """Belong to a wrapped optimizer from now on."""
        self._reference = weakref.ref(optimizer)

    def detach(self) -> None:
        """Another replica takes this one's place."""
        self._stale = True

    def check_attached(self) -> None:
        """Raise ReplicaStateError, if another replica has taken this one's place."""
        if self._stale:
            raise ReplicaStateError(STALE)

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer; None if it is gone."""
        return self._reference()

    def continue_from(self, before: Any) -> None:  # noqa: B027  some know nothing that their arguments do not say
        """Take over what user code has told the replica of the same optimizer among other ranks."""

    def settings_in_force(self) -> dict[str, Any]:
        """Return what user code has set on the replica's optimizer, on all ranks alike; it can be pickled."""
        return {}

    def take_settings(self, settings: dict[str, Any]) -> None:  # noqa: B027  some have none
        """Take what ``settings_in_force`` has returned on another rank."""

    @property
    def open_passes(self) -> int:
        """Backward passes of a step that has not ended, whose gradients would not outlive a change of the ranks."""
        return 0

    def extra_state(self) -> dict[str, Any]:
        """Return state of the optimizer beside the wrapped one's own, by its key in ``state_dict()``."""
        return {}

    def bind(self, engine: RankRuntime) -> None:  # noqa: B027  on a CPU there is nothing to bind
        """Let the engine's work on vectors follow this thread's, from now on."""

    @abc.abstractmethod
    def read_double(self) -> Vector:
        """Return all weights that other ranks have too, shape (n,), float64, a new vector."""

    @abc.abstractmethod
    def buffers(self) -> Buffers | None:
        """Return the buffers that are to agree; None, on all ranks, if none were given."""


class WeightReplica(Replica):
    """The replica of a rank that has weights of its own: gossip, leaders. A vector holds all weights that are mixed."""

    # -- weights ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def prepare(self) -> None:
        """Make sure that the weights can be read and mixed, before a worker is made.

        Raises:
            ValueError: there are none yet, or some that mixing would harm.
        """

    def check(self) -> None:
        """Refuse weights that have changed since, so that mixing would harm them; before a step.

        Raises:
            ValueError: with a hint.
        """

    @abc.abstractmethod
    def read(self) -> Vector:
        """Return all weights, shape (n,), a new vector."""

    @abc.abstractmethod
    def write(self, weights: Vector) -> None:
        """Make these the model's weights."""

    @abc.abstractmethod
    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        """Return names and checksums of what must be the same on all ranks; of ``resumed`` weights, names only."""

    @abc.abstractmethod
    def message_format(
        self, compression: str, rank_group: RankGroup, parts: int, messages: int, plain: int, received: int
    ) -> MessageFormat:
        """Return how vectors of weights travel.

        Args:
            compression: by name.
            rank_group: the ranks that gossip.
            parts: a message holds one of so many parts of a vector.
            messages: the most that a rank sends in one exchange.
            plain: the most of these that may go as they are.
            received: the most that come in one exchange; 0 where nobody knows.
        """

    @abc.abstractmethod
    def is_finite(self, weights: Vector) -> bool:
        """Tell whether no weight is NaN or infinite."""

    @abc.abstractmethod
    def describe_nonfinite(self) -> str:
        """Return which weights of the model are NaN or infinite, and what may help."""

    def constrained(self, weights: Vector) -> Vector:
        """Return the weights, shape (n,), with the model's constraints applied: a new vector if there are any, else the
        same one."""
        return weights

    def sizes(self) -> list[int]:
        """Return the number of elements of each parameter, in the order of the vector."""
        return [len(self.read())]

    def frozen(self) -> list[slice]:
        """Return the elements of frozen parameters."""
        return []

    # -- beside the weights -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def keep_buffers(self) -> Callable[[], None]:
        """Return a function that puts the values that buffers have now back."""

    @abc.abstractmethod
    def statistics(self) -> Statistics | None:
        """Return the batch-norm statistics that travel with pulls, as they are now; None if none do.

        Returns:
            float64, shape (2 m,): m values, then for each 1, or 0 if its buffer is not finite: all values of such a
            buffer are 0. Or a function that makes this vector later, from the values read now.
        """

    @abc.abstractmethod
    def clip(self, vector: Vector, one: Vector, other: Vector) -> Vector:
        """Return ``vector``, each element moved between those of two others."""

    def learning_rates(self) -> list[tuple[int, Any]]:
        """Return (elements, learning rate now) of consecutive parts of the vector, one for each parameter group; always
        of the same parts. A rate is an object that ``float()`` turns into a number at the end of the step."""
        return [(len(self.read()), 1.0)]

    def inertia(self) -> tuple[float, float]:
        """Return how an update depends on learning rates of earlier steps.

        Returns:
            (beta, lead): with r the average of learning rates with weights (1 - beta) beta^age, an update is of the
            size of (1 - lead) r + lead times the learning rate of now. (0, 0): it goes by that of now alone.
        """
        return 0.0, 0.0

    # -- momentum, of an optimizer that ``check_momentum`` has not refused ------------------------------------------

    @abc.abstractmethod
    def check_momentum(self) -> None:
        """Refuse an optimizer whose momentum is not known to be that of SGD.

        Raises:
            ValueError: with a hint.
        """

    @abc.abstractmethod
    def momentum(self) -> Vector:
        """Return the momentum of all weights, shape (n,), a new vector; 0 where there is none yet."""

    @abc.abstractmethod
    def write_momentum(self, momentum: Vector) -> None:
        """Make this the momentum."""

    def velocity(self, momentum: Vector, rates: Sequence[tuple[int, float]]) -> Vector:
        """Return a momentum in the units in which the optimizer keeps it; by default those of gradients.

        Args:
            momentum: in units of gradients, shape (n,).
            rates: as of ``learning_rates``.
        """
        return momentum

    def add_to_momentum(self, correction: Vector) -> None:
        """Add a vector, in the optimizer's units, to the momentum of parameters that had a gradient in this step."""

    # -- what optimizers may have ---------------------------------------------------------------------------------

    def moving_averages(self) -> Vector | None:
        """Return the optimizer's moving averages of the weights, None if it has none."""
        return None

    def write_moving_averages(self, averages: Vector) -> None:
        """Make these the moving averages."""

    def warn_before_drain(self) -> None:
        """Warn of what a drain leaves on this rank."""

    def number(self, loss: Any) -> Any:
        """Return what ``float()`` makes a loss of later.

        Raises:
            ValueError: it is several numbers.
        """
        return loss
