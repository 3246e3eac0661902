"""State that a rank with weights of its own keeps when its job has lost other ranks, or gained some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvd_async.runtime.interfaces import Vector


class Kept(NamedTuple):
    """A rank's state, beside what the wrapped optimizer has.

    Attributes:
        weights: its own, shape (n,); None of a rank that has only come to know what is shared.
        own: state of its own, by name.
        shared: vectors of shape (n,) that all ranks have after as many averages or pulls, by name.
        version: how many these are.
        catch_up: returns the weights that follow where the shared vectors and the version are others'; None where they
            stay as they are.
    """

    weights: Vector
    own: Mapping[str, Any] = {}
    shared: Mapping[str, Vector] = {}
    version: int = 0
    catch_up: Callable[[Mapping[str, Vector], int], Vector] | None = None
