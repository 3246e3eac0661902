"""Arrival of a rank's gradients on a GPU, under a quorum: at their events, or at a marker before them.

A rank that arrived when its gradients are computed would have an idle device by definition: the host queues the update
and the next forward pass only after the round has started. So it arrives a *lead* earlier, at a *marker*: an event that
is recorded in the hook of a parameter, behind which the device needs about that long for the rest of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_async.torch import streams

AUTO_SECONDS, AUTO_SHARE = 0.008, 0.25
"""Meaning of ``arrival_lead="auto"``: seconds, and the most as a share of a step."""
FIRST_GUESS = 0.75
"""Place of the marker among the hooks of a step until the first times are known, as a share of them."""
PERIOD, FIRST = 50, 12
"""Steps from one measurement of the marker's place to the next, and the step of the first one. (It is the second after
those in which gradients are compared, for which the host waits.)"""
MOST_TIMES = 64
"""Number of hooks in which the time is taken, at most."""


class Arrivals:
    """Arrivals of one optimizer's vectors, on the training thread and autograd's.

    Attributes:
        marker: event of this step that the device passes a while before it has computed the last gradients; None before
            it is recorded.
    """

    def __init__(self) -> None:
        self.marker: Any = None
        self._last: Any = None
        """The event of the last vector."""

    def when(self, vector: torch.Tensor | None, ahead: bool, action: Callable[[], None]) -> None:
        """Call ``action`` once the device has computed a vector, see ``rank.Arrives``; on a CPU it has.

        Args:
            vector: of this step; None: the last one.
            ahead: whether the marker will do, if it was recorded before the vector was made.
            action: what to call.
        """
        event, _ = getattr(vector, streams.READY, (None, None))  # (None has no event either)
        if event is not None and ahead and self.marker is not None:
            event = self.marker
        self._last = self._last if event is None else event
        if self._last is None:
            action()
        else:
            streams.gpu.when_done(self._last, action)


class Lead:
    """Places the marker of one optimizer's steps.

    Args:
        arrivals: gets the marker.
        parameters: of which hooks may set it, in the order in which gradients come, on one device.
        seconds: the lead; "auto": ``AUTO_SECONDS``, at most ``AUTO_SHARE`` of a step.
        in_last_pass: returns whether a parameter's hook belongs to the last backward pass of a step.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        parameters: Sequence[torch.Tensor],
        seconds: float | str,
        in_last_pass: Callable[[torch.Tensor], bool],
    ) -> None:
        self._arrivals, self._parameters, self._seconds = arrivals, parameters, seconds
        self._in_last_pass = in_last_pass
        self._steps = 0
        self._marked: torch.Tensor | None = None
        """The parameter whose hook sets the marker."""
        self._hook: Any = None
        self._timers: list[Any] = []
        self._times: list[tuple[torch.Tensor, Any]] = []
        """Parameters and the events in their hooks, in the order of the backward pass."""
        self._ends: list[Any] = []
        """Events at the end of a measured step and of the one before it."""

    def begin_step(self) -> None:
        """Prepare a step, whose backward passes follow."""
        self._arrivals.marker = None
        if self._marked is None:
            trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
            if trainable:
                self._mark_at(trainable[int(FIRST_GUESS * len(trainable))])
        if self._times and len(self._ends) == 2 and self._ends[1].query():
            self._learn()
        if self._steps % PERIOD == FIRST:
            self._stop_timing()
            self._times.clear()
            every = 1 + len(self._parameters) // MOST_TIMES
            hooked = [parameter for parameter in self._parameters[::every] if parameter.requires_grad]
            self._timers = [parameter.register_post_accumulate_grad_hook(self._note_time) for parameter in hooked]

    def end_step(self) -> None:
        """Note that all gradients of the step are queued."""
        place, self._steps = self._steps % PERIOD, self._steps + 1
        if self._parameters and place in (FIRST - 1, FIRST):
            self._ends = [*self._ends[-1:], streams.gpu.record(self._parameters[0].device, timed=True)]
            self._stop_timing()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self._stop_timing()
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._marked = None

    def _mark_at(self, parameter: torch.Tensor) -> None:
        self.remove()
        self._marked, self._hook = parameter, parameter.register_post_accumulate_grad_hook(self._mark)

    def _mark(self, parameter: torch.Tensor) -> None:
        if self._in_last_pass(parameter):
            self._arrivals.marker = streams.gpu.record(parameter.device)

    def _note_time(self, parameter: torch.Tensor) -> None:
        if self._in_last_pass(parameter):
            self._times.append((parameter, streams.gpu.record(parameter.device, timed=True)))

    def _stop_timing(self) -> None:
        for timer in self._timers:
            timer.remove()
        self._timers = []

    def _learn(self) -> None:
        """Place the marker by the times of the last measured step: in the last hook that is early enough."""
        before, end = self._ends
        lead = self._seconds
        if isinstance(lead, str):
            lead = min(AUTO_SECONDS, AUTO_SHARE * streams.gpu.seconds(before, end))
        early = [parameter for parameter, event in self._times if streams.gpu.seconds(event, end) >= lead]
        first, _ = self._times[0]
        chosen = early[-1] if early else first
        self._times.clear()
        if chosen is not self._marked and chosen.requires_grad:
            self._mark_at(chosen)
