"""State that a rank with its own weights keeps across a membership change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvd_async.runtime.interfaces import Vector


class Kept(NamedTuple):
    """State of a rank, without the state of the wrapped optimizer.

    Attributes:
        weights: weights of this rank, shape (n,); None for a rank that has only received the shared vectors.
        own: other state of this rank, by name.
        shared: vectors of shape (n,), by name, that are equal on all ranks after the same number of averages or pulls.
        version: that number.
        catch_up: returns the weights to continue with, given the shared vectors and the version of a more advanced
            rank; None if the weights do not depend on them.
    """

    weights: Vector
    own: Mapping[str, Any] = {}
    shared: Mapping[str, Vector] = {}
    version: int = 0
    catch_up: Callable[[Mapping[str, Vector], int], Vector] | None = None
