"""Hands buckets over from autograd's hooks, while the earlier layers still compute their gradients.

It does so only from ``zero_grad()`` to ``step()`` of the optimizer whose parameters they are, and not after a drain, a
cut or ``discard()``: in a GAN the generator's backward also leaves gradients in the discriminator, which are not the
discriminator's next step; a second optimizer may train the same model, and an evaluation may compute gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.torch.bucket_layout import Layout


class Overlap:
    """The hooks of one optimizer.

    Args:
        layout: of its buckets.
        passes: backward passes of a step.
        early: whether buckets may leave before ``step()``; else passes are counted, and that is all.
        hand_over: takes a bucket's number; called from the backward pass. Held weakly, as a bound method.
    """

    def __init__(self, layout: Layout, passes: int, early: bool, hand_over: Callable[[int], None]) -> None:
        self._layout, self.passes, self._early = layout, passes, early
        self._hand_over = weakref.WeakMethod(hand_over)
        self._hooks: dict[int, Any] = {}
        self._armed = False
        self._missing: list[int] = []
        self._expected: set[int] = set()
        """Parameters (ids) whose gradients ``_missing`` counts."""
        self._passed: dict[int, int] = {}
        self._handed: set[int] = set()
        """Buckets of this step that the hooks have handed over."""

    @property
    def passed(self) -> int:
        """Backward passes since ``zero_grad()`` whose gradients no step has taken."""
        return max(self._passed.values(), default=0) if self._armed else 0

    def arm(self, handed: Collection[int]) -> None:
        """``zero_grad()`` was called: what backward brings from now on is the next step's.

        Args:
            handed: the buckets of this step that are on their way already.

        Raises:
            ReplicaStateError: there are some.
        """
        if handed:
            raise ReplicaStateError(
                "zero_grad() between backward() and step(): the gradients are on their way. Call it after step(), or "
                "before backward(). To throw a pass away (an adversarial example, the first half of SAM), take its "
                "gradient by torch.autograd.grad(), or call model.zero_grad() instead, before each pass of the step: "
                "then gradients leave in step()"
            )
        for parameter in self._layout.parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = None  # (whatever interrupts this, it must not be hooked twice)
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(_weakly(self))
        self._armed = True
        self._handed.clear()
        self._expected = {id(p) for p in self._layout.parameters if p.requires_grad}
        self._missing = [sum(p.requires_grad for p in bucket.parameters) for bucket in self._layout.buckets]
        self._passed.clear()

    def disarm(self) -> None:
        """``step()`` was called, or a drain or cut has ended: what backward brings is not this optimizer's."""
        self._armed = False

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks.values():
            if hook is not None:
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
        if not self._early:
            return
        if bucket in self._handed:
            if _in_reentrant_checkpoint():
                raise ReplicaStateError(
                    "reentrant checkpointing brings the gradient of a module that is used more than once in several "
                    "parts, and the first is on its way already: call torch.utils.checkpoint.checkpoint() with "
                    "use_reentrant=False"
                )
            raise ReplicaStateError(
                f"more than {self.passes} backward pass(es) before step(): the gradients of the first are on their way "
                f"already. Pass backward_passes_per_step= to EagerOptimizer to accumulate gradients; to throw a pass "
                f"away, take its gradient by torch.autograd.grad(), or clear gradients by model.zero_grad() instead of "
                f"the optimizer's"
            )
        if passed == self.passes and id(parameter) in self._expected:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0 and self._none_joined(bucket):
                hand_over(bucket)
                self._handed.add(bucket)

    def _none_joined(self, bucket: int) -> bool:
        """Whether no parameter was unfrozen since ``arm``, whose gradient may still be to come."""
        return all(id(p) in self._expected for p in self._layout.buckets[bucket].parameters if p.requires_grad)


def _in_reentrant_checkpoint() -> bool:
    """Whether this backward pass was started by another one: in the ``backward()`` of a custom function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


def _weakly(overlap: Overlap) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the optimizer alive."""
    reference = weakref.ref(overlap)

    def hook(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.ready(parameter)

    return hook
