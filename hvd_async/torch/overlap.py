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

    A hook runs for each parameter in each backward pass, so it only counts, in lists that its closure holds.

    Args:
        layout: of its buckets.
        passes: backward passes of a step.
        early: whether buckets may leave before ``step()``; else passes are counted, and that is all.
        hand_over: takes a bucket's number; called from the backward pass. Held weakly, as a bound method.
    """

    def __init__(self, layout: Layout, passes: int, early: bool, hand_over: Callable[[int], None]) -> None:
        self._layout, self._passes, self._early = layout, passes, early
        self._hand_over = weakref.WeakMethod(hand_over)
        self._parameters = layout.parameters
        self._bucket = [layout.bucket_of[id(p)] for p in self._parameters]
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        """Indices of the parameters that have a hook."""
        self._armed = False
        self._trainable: list[bool] | None = None
        """``requires_grad`` of each parameter at the last ``arm``."""
        self._all_due: list[int] = []
        self._all_missing: list[int] = []
        self._frozen: list[list[torch.Tensor]] = [[] for _ in layout.buckets]
        """Parameters of each bucket that were frozen at the last ``arm``."""
        self._passed = [0] * len(self._parameters)
        """Backward passes since ``arm`` that have brought each parameter's gradient."""
        self._due = [0] * len(self._parameters)
        """The pass that completes each parameter's gradient; 0 if nothing waits for it."""
        self._missing = [0] * len(layout)
        """Number of parameters of each bucket whose gradients are incomplete."""
        self._handed = [False] * len(layout)
        """Whether the hooks have handed over each bucket of this step."""

    @property
    def passes(self) -> int:
        """Backward passes of a step."""
        return self._passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._passes = passes
        self._all_due = [passes if due else 0 for due in self._all_due]
        self._due[:] = [passes if due else 0 for due in self._due]

    @property
    def passed(self) -> int:
        """Backward passes since ``zero_grad()`` whose gradients no step has taken."""
        return max(self._passed, default=0) if self._armed else 0

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
        trainable = [p.requires_grad for p in self._parameters]
        if trainable != self._trainable:
            self._prepare(trainable)
        self._armed = True
        self._passed[:] = [0] * len(self._passed)
        self._due[:] = self._all_due
        self._missing[:] = self._all_missing

    def _prepare(self, trainable: list[bool]) -> None:
        """Hook trainable parameters, and compute what ``arm`` expects until ``requires_grad`` changes."""
        self._trainable = None
        self._all_due = [self._passes if self._early and one else 0 for one in trainable]
        self._frozen = [[p for p in bucket.parameters if not p.requires_grad] for bucket in self._layout.buckets]
        self._all_missing = [
            len(bucket.parameters) - len(frozen)
            for bucket, frozen in zip(self._layout.buckets, self._frozen, strict=True)
        ]
        for place, one in enumerate(trainable):
            if one and place not in self._hooked:
                self._hooked.add(place)  # (whatever interrupts this, it must not be hooked twice)
                self._handles.append(self._parameters[place].register_post_accumulate_grad_hook(self._hook(place)))
        self._trainable = trainable  # (last: after an interrupt the next ``arm`` does the rest)

    def _hook(self, place: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter; it does not keep the optimizer alive."""
        passed, due, missing, handed = self._passed, self._due, self._missing, self._handed
        bucket, reference = self._bucket[place], weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            passed[place] = now = passed[place] + 1
            if handed[bucket]:
                if (alive := reference()) is not None:
                    alive._came_late()
            elif now == due[place]:
                missing[bucket] -= 1
                if missing[bucket] == 0 and (alive := reference()) is not None:
                    alive._is_whole(bucket)

        return hook

    def disarm(self) -> None:
        """``step()`` was called, or a drain or cut has ended: what backward brings is not this optimizer's."""
        self._armed = False  # (first: an interrupt may leave what hooks count as it was)
        self._due[:] = [0] * len(self._due)
        self._handed[:] = [False] * len(self._handed)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._trainable = None

    def _is_whole(self, bucket: int) -> None:
        """A backward pass has brought the last expected gradient of a bucket. (If a parameter was unfrozen since
        ``arm``, its gradient may still come: then the bucket leaves in ``step()``.)"""
        hand_over = self._hand_over()
        if self._armed and hand_over is not None and True not in [p.requires_grad for p in self._frozen[bucket]]:
            hand_over(bucket)
            self._handed[bucket] = True

    def _came_late(self) -> None:
        """A backward pass has brought a gradient of a bucket that is on its way.

        Raises:
            ReplicaStateError: there are more passes than was said.
        """
        if not self._armed or self._hand_over() is None:
            return
        if _in_reentrant_checkpoint():
            raise ReplicaStateError(
                "reentrant checkpointing brings the gradient of a module that is used more than once in several "
                "parts, and the first is on its way already: call torch.utils.checkpoint.checkpoint() with "
                "use_reentrant=False"
            )
        raise ReplicaStateError(
            f"more than {self._passes} backward pass(es) before step(): the gradients of the first are on their way "
            f"already. Pass backward_passes_per_step= to EagerOptimizer to accumulate gradients; to throw a pass "
            f"away, take its gradient by torch.autograd.grad(), or clear gradients by model.zero_grad() instead of "
            f"the optimizer's"
        )


def _in_reentrant_checkpoint() -> bool:
    """Whether this backward pass was started by another one: in the ``backward()`` of a custom function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
