"""Hands buckets over from autograd's hooks, while the earlier layers still compute their gradients.

It does so only from ``zero_grad()`` to ``step()`` of the optimizer whose parameters they are: in a GAN the generator's
backward also leaves gradients in the discriminator, which are not the discriminator's next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.torch.layout import Layout


class _Seen(NamedTuple):
    """A ``p.grad`` that was handed over, and its version counter then."""

    parameter: torch.Tensor
    gradient: torch.Tensor | None
    version: int


class Overlap:
    """The hooks of one optimizer.

    Args:
        layout: of its buckets.
        passes: backward passes of a step.
        hand_over: takes a bucket's number; called from the backward pass. Held weakly, as a bound method.
    """

    def __init__(self, layout: Layout, passes: int, hand_over: Callable[[int], None]) -> None:
        self._layout, self.passes = layout, passes
        self._hand_over = weakref.WeakMethod(hand_over)
        self._hooks: dict[int, Any] = {}
        self._armed = False
        self._missing: list[int] = []
        self._expected: set[int] = set()
        """Parameters (ids) whose gradients ``_missing`` counts."""
        self._passed: dict[int, int] = {}
        self._seen: list[_Seen] = []
        self.handed: set[int] = set()
        """Buckets of this step that the hooks have handed over."""

    def arm(self) -> None:
        """``zero_grad()`` was called: what backward brings from now on is the next step's.

        Raises:
            ReplicaStateError: part of a step is on its way already.
        """
        if self.handed:
            raise ReplicaStateError(
                "zero_grad() between backward() and step(): the gradients are on their way. Call it after step(), or "
                "before backward()"
            )
        for parameter in self._layout.parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(_weakly(self))
                self._hooks[id(parameter)] = hook
        self._armed = True
        self._expected = {id(p) for p in self._layout.parameters if p.requires_grad}
        self._missing = [sum(p.requires_grad for p in bucket.parameters) for bucket in self._layout.buckets]
        self._passed.clear()

    def disarm(self) -> None:
        """``step()`` was called.

        Raises:
            ReplicaStateError: a gradient has changed since it was handed over.
        """
        seen, self._seen = self._seen, []
        self._armed = False
        self.handed = set()
        if any(s.parameter.grad is not s.gradient or _version(s.gradient) != s.version for s in seen):
            raise ReplicaStateError(
                "a gradient was changed after backward() and before step(), when it was on its way to the other ranks "
                "already. Clip averaged gradients by round_transform=, or between optimizer.synchronize() and `with "
                "optimizer.skip_synchronize(): optimizer.step()`; accumulate by backward_passes_per_step="
            )

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def ready(self, parameter: torch.Tensor) -> None:
        """A backward pass has brought this parameter's gradient.

        Raises:
            ReplicaStateError: there are more passes than was said.
        """
        hand_over = self._hand_over()
        if not self._armed or hand_over is None:
            return
        bucket = self._layout.bucket_of[id(parameter)]
        passed = self._passed[id(parameter)] = self._passed.get(id(parameter), 0) + 1
        if bucket in self.handed:
            raise ReplicaStateError(
                f"more than {self.passes} backward pass(es) before step(): the gradients of the first are on their way "
                f"already. Pass backward_passes_per_step= to EagerOptimizer to accumulate gradients"
            )
        if passed == self.passes and id(parameter) in self._expected:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0 and self._none_joined(bucket):
                hand_over(bucket)
                self.handed.add(bucket)
                self._seen += [_Seen(p, p.grad, _version(p.grad)) for p in self._layout.buckets[bucket].parameters]

    def _none_joined(self, bucket: int) -> bool:
        """Whether no parameter was unfrozen since ``arm``, whose gradient may still be to come."""
        return all(id(p) in self._expected for p in self._layout.buckets[bucket].parameters if p.requires_grad)


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _weakly(overlap: Overlap) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the optimizer alive."""
    reference = weakref.ref(overlap)

    def hook(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.ready(parameter)

    return hook
