"""The torch replica under partial allreduce: gradients out by bucket, rounds in, and what all ranks have in common.

A gradient passes this file from top to bottom: ``Overlap`` notices that the backward pass has filled its bucket,
``Checks`` looks for NaN and infinities on a GPU, ``Watch`` finds later changes. ``GradientReplica`` drives them all.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound, Tail
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import eager
from hvd_async.optimizers.agreement import Buffers
from hvd_async.optimizers.replica import warn_of_open_passes
from hvd_async.runtime.interfaces import RankRuntime
from hvd_async.runtime.log import users_line
from hvd_async.runtime.machine import STATE
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Hyper
from hvd_async.torch import hyperparameters, shared_models, streams
from hvd_async.torch.arrival import Arrivals, Lead
from hvd_async.torch.gradient_format import MIB, Layout, differentiable, make_wire, memory_order, slots, wire_dtype
from hvd_async.torch.streams import record_ready
from hvd_async.torch.tensors import NamedBuffers, checksum, flat_double, signature, take_over
from hvd_async.torch.update import LEADS, Extrapolation, StepHooks, drop_made_state

if TYPE_CHECKING:
    from hvd_async.torch.factories import EagerArguments

# -- hooks that hand buckets over during the backward pass -------------------------------------------------------------
# They do so only from ``zero_grad()`` to ``step()`` of the optimizer that has these parameters, and not after a drain,
# a cut or ``discard()``. In a GAN the generator's backward pass also leaves gradients in the discriminator, which are
# not those of its next step; a second optimizer may train the same model, and an evaluation may compute gradients.


class Overlap:
    """Hooks that hand the buckets of one optimizer over during the backward pass.

    A hook runs for each parameter in each backward pass, so it only counts, in lists that its closure holds.

    Args:
        layout: of the optimizer's buckets.
        passes: backward passes per step.
        early: whether buckets may be handed over before ``step()``; otherwise passes are only counted.
        hand_over: takes a bucket's number; called from the backward pass. A bound method, held weakly.
    """

    def __init__(self, layout: Layout, passes: int, early: bool, hand_over: Callable[[int], None]) -> None:
        self._layout, self._passes, self._early = layout, passes, early
        self._hand_over = weakref.WeakMethod(hand_over)
        self._parameters = layout.parameters
        self._bucket = [layout.bucket_of[id(p)] for p in self._parameters]
        self._place = {id(p): place for place, p in enumerate(self._parameters)}
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

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self._passes = passes
        self._all_due = [passes if due else 0 for due in self._all_due]
        self._due[:] = [passes if due else 0 for due in self._due]

    def in_last_pass(self, parameter: torch.Tensor) -> bool:
        """Return, in a later hook of a parameter, whether its gradient of this step is complete."""
        return self._armed and self._passed[self._place[id(parameter)]] == self._passes

    @property
    def passed(self) -> int:
        """Backward passes since ``zero_grad()`` whose gradients no step has taken."""
        return max(self._passed, default=0) if self._armed else 0

    def arm(self, handed: Collection[int]) -> None:
        """Count the gradients of later backward passes as the next step's, since ``zero_grad()`` was called.

        Args:
            handed: buckets of this step that have been handed over.

        Raises:
            ReplicaStateError: there are any.
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
                self._hooked.add(place)  # (first: after an interrupt it must not be hooked twice)
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
                    alive._filled(bucket)

        return hook

    def disarm(self) -> None:
        """Ignore later backward passes, since ``step()`` was called, or a drain or cut has ended."""
        self._armed = False  # (first: an interrupt may leave what hooks count as it was)
        self._due[:] = [0] * len(self._due)
        self._handed[:] = [False] * len(self._handed)

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._trainable = None

    def _filled(self, bucket: int) -> None:
        """Hand over a bucket whose last expected gradient is there. (If a parameter was unfrozen since ``arm``, its
        gradient may still come: then the bucket is handed over in ``step()``.)"""
        hand_over = self._hand_over()
        frozen = self._frozen[bucket]
        is_whole = not frozen or not any(p.requires_grad for p in frozen)
        if self._armed and hand_over is not None and is_whole:
            hand_over(bucket)
            self._handed[bucket] = True

    def _came_late(self) -> None:
        """Refuse a gradient of a bucket that has been handed over.

        Raises:
            ReplicaStateError: there are more backward passes than expected.
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
    """Return whether this backward pass was started by another one, in the ``backward()`` of a custom function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


# -- gradients that are not finite, found on the GPU without waiting for it --------------------------------------------


class Checks:
    """Finds NaN and infinities in one optimizer's vectors, on the training thread and autograd's.

    Args:
        buckets: number of the optimizer's buckets.
    """

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._queued: dict[Any, tuple[torch.Tensor, tuple[torch.Tensor, ...], list[int]]] = {}
        """By stream: a flag per bucket, shape (buckets,), above 0 where its vector was not finite; each as a view; the
        buckets checked."""
        self._sent: deque[list[tuple[streams.Later, list[int]]]] = deque()
        """By step, flags that are being copied to the host."""
        self._ones: dict[torch.device, torch.Tensor] = {}

    def empty_unless_finite(self, bucket: int, vector: torch.Tensor, overflow: torch.Tensor | None = None) -> None:
        """Queue kernels that set a vector on a GPU, its count too, to 0 if it holds NaN or an infinity. The caller has
        turned gradients off.

        Args:
            bucket: one that was not checked since the last ``send``.
            vector: shape (n,), floating point.
            overflow: shape (), on a GPU; above 0: the vector is set to 0 in any case.
        """
        device = vector.device
        if device not in self._ones:
            self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
        stream = streams.gpu.current_stream(device)
        if stream not in self._queued:
            flags = torch.zeros(self._buckets, dtype=torch.float32, device=device)
            self._queued[stream] = flags, flags.unbind(), []
        _, views, checked = self._queued[stream]
        spoilt = views[bucket]
        if overflow is not None:
            spoilt.copy_(overflow)
        torch._amp_foreach_non_finite_check_and_unscale_([vector], spoilt, self._ones[device])
        vector.masked_fill_(spoilt.bool(), 0.0)
        checked.append(bucket)

    def send(self) -> None:
        """Start the copy of the flags since the last call to the host: all vectors of a step have been checked."""
        if self._queued:
            queued, self._queued = self._queued, {}
            self._sent.append([(streams.Later(flags), checked) for flags, _, checked in queued.values()])

    def emptied(self, wait: bool) -> list[list[int]]:
        """Return, for each step whose flags have arrived since the last call, the buckets that were not finite.

        Args:
            wait: whether to wait for the flags of all vectors.
        """
        if wait:
            self.send()
        found = []
        while self._sent and (wait or all(flags.is_ready() for flags, _ in self._sent[0])):
            step = self._sent.popleft()
            read = [(flags.numbers(), checked) for flags, checked in step]
            found.append([bucket for numbers, checked in read for bucket in checked if numbers[bucket]])
        return found


# -- gradients that were changed after they had been handed over -------------------------------------------------------
# An in-place operation increments a tensor's version counter, unless it uses ``.data``; and clipping that only logs a
# norm increments it without a change. So in the first steps the bits are compared too, by a fingerprint of every bucket
# that is handed over early, which the host waits for. Later only counters are compared, which costs the device nothing.
# If one has moved then, it is too late to tell whether the bits have: the vector belongs to its collective. So that is
# an error, unless the first steps have shown a script that writes and changes nothing: its bits are still compared.


FIRST_STEPS = 10
"""Number of steps with early buckets in which the bits of all of these are compared."""
CLIPPING = "round_transform=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)"
HINT = (
    f". To log a norm, call torch.nn.utils.get_total_norm(), which writes nothing. (Whether a write has changed a "
    f"bit is known in the first {FIRST_STEPS} steps; later if the script wrote without a change in these, or in "
    f"every step with HVD_ASYNC_CHECK=1; of sparse gradients never)"
)
"""Part of the error where no bits were compared."""
LANES = 1 << 16
"""Number of different weights: enough for the rows of a bucket of 32 MiB."""
ROW = 64
"""Adjacent words that are summed before they are weighted, so that a fingerprint costs little more than to read the
vector."""
SMALL = 1 << 13
"""Elements up to which each is weighted separately: in a small vector, one kernel less is worth more."""


class _Handed(NamedTuple):
    """A bucket when it was handed over: each ``p.grad`` and its version counter, and the fingerprint of its vector if
    its bits can be compared."""

    gradients: list[torch.Tensor | None]
    versions: list[int]
    fingerprint: torch.Tensor | None


class Watch:
    """Finds gradients of one optimizer that were changed after they had been handed over.

    Attributes:
        writes: whether the user's code has written to such gradients and left their bits as they were.
    """

    def __init__(self) -> None:
        self.writes = False
        self._layout = Layout([])
        self._handed: dict[int, _Handed] = {}
        self._steps = 0
        """Number of steps that have ended with early buckets."""
        self._first = FIRST_STEPS if os.environ.get("HVD_ASYNC_CHECK", "0") in ("", "0") else math.inf
        """Number of steps in which bits are compared even if no counter has moved."""

    def use(self, layout: Layout) -> None:
        """Watch the buckets of another layout."""
        self._layout = layout
        self.clear()

    def handed(self, bucket: int, vector: torch.Tensor) -> None:
        """Note that a bucket is about to be handed over, as this vector."""
        gradients = [p.grad for p in self._layout.buckets[bucket].parameters]
        versions = [0 if gradient is None else gradient._version for gradient in gradients]
        print_ = None
        if self.writes or self._steps < self._first:
            # (the bits of a sparse gradient may differ each time it is made dense)
            sparse = True in [gradient is not None and gradient.is_sparse for gradient in gradients]
            print_ = None if sparse else fingerprint(vector)
        self._handed[bucket] = _Handed(gradients, versions, print_)

    def check(self, buckets: Collection[int], vector: Callable[[int], torch.Tensor]) -> None:
        """Check, at the end of a step, the buckets that were handed over early.

        Args:
            buckets: numbers of these buckets.
            vector: makes a bucket's vector of its present gradients.

        Raises:
            ReplicaStateError: a gradient differs from the one that was handed over, or may differ.
        """
        handed = {bucket: one for bucket, one in self._handed.items() if bucket in buckets}
        thorough = self._steps < self._first
        self._steps += bool(handed)
        for bucket, one in handed.items():
            now = [p.grad for p in self._layout.buckets[bucket].parameters]
            versions = [0 if gradient is None else gradient._version for gradient in now]
            moved = versions != one.versions or any(map(operator.is_not, now, one.gradients))
            if one.fingerprint is None:
                wrong = moved
            else:
                wrong = (moved or thorough) and not torch.equal(fingerprint(vector(bucket)), one.fingerprint)
                self.writes |= moved and not wrong
            if wrong:
                seen, hint = ("written to", HINT) if one.fingerprint is None else ("changed", "")
                raise ReplicaStateError(
                    f"a gradient was {seen} after backward() and before step(), when it was on its way to the other "
                    f"ranks already. Clip averaged gradients by {CLIPPING}, or between optimizer.synchronize() and "
                    f"`with optimizer.skip_synchronize(): optimizer.step()`; accumulate by backward_passes_per_step=; "
                    f"leave out an all_reduce() of gradients, which step() averages{hint}"
                )

    def clear(self) -> None:
        """Drop references to the gradients of a step that is over."""
        self._handed.clear()


def fingerprint(vector: torch.Tensor) -> torch.Tensor:
    """Return a hash of 64 bits of a vector's bits: the sum of its words, weighted by an odd number per row of 64 words,
    plus that of their upper halves. (The first sum alone has only the parity of the words' highest bits, which are
    signs.) Sums of integers are the same in any order, on any number of threads.

    Args:
        vector: shape (n,), contiguous, float32 or float64.

    Returns:
        Shape (), int64, on the vector's device; it is not waited for.
    """
    wide = vector.dtype == torch.float64
    if vector.numel() <= SMALL:
        words = vector.view(torch.int64 if wide else torch.int32)
        total = _weighted(words)
    else:
        half = 0 if wide else vector.numel() % 2
        words = vector[: vector.numel() - half].view(torch.int64)
        in_rows = words.numel() // ROW * ROW
        odd = vector[vector.numel() - half :].view(torch.int32)
        total = _weighted(torch.cat([words[:in_rows].view(-1, ROW).sum(1), words[in_rows:], odd]))
    return total + 3 * _weighted(words >> 32) if wide or vector.numel() > SMALL else total


def _weighted(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of integers, each times the odd number of its place in ``LANES``."""
    if (in_lanes := numbers.numel() // LANES * LANES) > LANES:
        numbers = torch.cat([numbers[:in_lanes].view(-1, LANES).sum(0), numbers[in_lanes:]])
    return (numbers * _weights(numbers.device)[: numbers.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, shape (2 ``LANES``,), the same in every process."""
    drawn = torch.randint(-(2**62), 2**62, (2 * LANES,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    return (drawn | 1).to(device)


# -- the replica -------------------------------------------------------------------------------------------------------


RoundTransform = Callable[[Sequence[torch.Tensor]], object]
INSTEAD = "pass the code between synchronize() and step() as round_transform=, so that it runs on every round"


class GradientReplica(eager.GradientReplica):
    """Parameters, their buckets and the wrapped torch optimizer that applies rounds.

    Args:
        rank_group: the ranks that share the optimizer.
        given: the user's arguments.
        factors: as in the attributes.
        named: parameters' names by id; None if none were given.
        named_buffers: buffers that agree after a drain.

    Attributes:
        before, after: factors of a gradient when it is handed over, and of a round's sum when it is applied.
        shown: the round that ``synchronize()`` has put into p.grad, until step() applies it or the next one replaces
            it.
        unshown: rounds applied since ``synchronize()`` last showed one.
        stepped: rounds since the last drain or cut that it showed and ``step()`` applied.
        skip: whether ``step()`` is to apply the round that is shown.
        recorded: the samples of this step's backward passes so far.
        counters: names of entries of parameter groups that the wrapped optimizer's ``step()`` itself changes.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        given: EagerArguments,
        factors: tuple[float, float],
        named: dict[int, str] | None,
        named_buffers: NamedBuffers,
    ) -> None:
        self.named, self.named_buffers = named, named_buffers
        self._rank_group, self._given = rank_group, given
        self._empties_on_device = given.nonfinite == "skip"
        """Whether vectors on a GPU are emptied there if they must not be seen, so that the host waits for nothing."""
        self.tail = Tail()
        self.recorded: list[int] = []
        self.passes = given.backward_passes_per_step
        self.before, self.after = factors
        self.round_transform, self.scaler = given.round_transform, given.scaler
        self.shown: ReducedRound | None = None
        self.skip = self.one_by_one = False
        self.unshown = self.stepped = 0
        self.counters: set[str] = set()
        self.extrapolation = Extrapolation()
        self.watch = Watch()
        self._checked: int | None = None
        self.met: list[torch.Tensor] = []
        """All parameters of the optimizer at the last ``prepare``."""
        self._use(Layout([]), early=False)

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        self.prepare()

    def detach(self) -> None:
        super().detach()
        self._remove_hooks()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters that can have a gradient; integer parameters are ignored."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if differentiable(p)]

    def check_groups(self) -> None:
        shared_models.check_groups(self.optimizer, self.met)

    def bind(self, engine: RankRuntime) -> None:
        """Let the engine use this thread's stream: both threads change what the ranks exchange. Raises as
        ``shared_models.check``."""
        if self._checked != shared_models.found.made:
            self._checked = shared_models.check(self.optimizer)
        if streams.bind_training_stream(engine, [bucket.parameters[0] for bucket in self.layout.buckets]):
            hyperparameters.begin_to_read(self.optimizer.param_groups)

    def continue_from(self, before: GradientReplica) -> None:
        self.take_settings(before.settings_in_force())
        self.extrapolation.leads = before.extrapolation.leads
        self.watch.writes = before.watch.writes
        for parameter in self.parameters:  # (an interrupted step has left half of its gradient there)
            parameter.grad = None

    def extra_state(self) -> dict[str, Any]:
        return self.extrapolation.saved(self.optimizer)

    def take_extra_state(self, state: Mapping[str, Any]) -> None:
        self.extrapolation.load(self.optimizer, state[LEADS])

    def settings_in_force(self) -> dict[str, Any]:
        return {"backward_passes_per_step": self.passes, "counters": sorted(self.counters)}

    def take_settings(self, settings: dict[str, Any]) -> None:
        self.set_passes(settings["backward_passes_per_step"])
        self.counters = set(settings["counters"])

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.passes = passes
        self.overlap.set_passes(passes)

    @property
    def open_passes(self) -> int:
        return self.overlap.passed

    # -- buckets ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Split the parameters into buckets, and hook them."""
        given, parameters = self._given, self.parameters
        self.met = [p for group in self.optimizer.param_groups for p in group["params"]]
        count = slots(given.compression, parameters, self._rank_group.size, given.max_staleness)
        self.tail = Tail(count, self._rank_group.index % count, given.weighting == "samples")
        # (an overflow of a scaled step is known at its end only; an error must come before anything is handed over)
        self.scaled = self.scaler is not None and self.scaler.is_enabled()
        groups = 0 if given.grouping is None else given.grouping
        layout = Layout(parameters, given.bucket_cap_mb * MIB, groups, self.tail)
        self._remove_hooks()
        self._use(layout, early=not self.scaled and given.nonfinite == "skip")

    def _use(self, layout: Layout, early: bool) -> None:
        """Hand gradients over in these buckets, ``early`` in the backward pass."""
        self.layout, self.checks = layout, Checks(len(layout))
        self.watch.use(layout)
        self.overlap = Overlap(layout, self.passes, early, self._bucket_ready)
        self.emptied = self.checks.emptied
        on_gpu = any(streams.gpu.holds(bucket.parameters[0]) for bucket in layout.buckets)
        self.arrivals, lead = Arrivals(), self._given.arrival_lead
        self.arrives = self.arrivals.when if on_gpu and self._given.quorum != "all" else None
        self.lead: Lead | None = None
        if self.arrives is not None and lead != 0:
            last = layout.buckets[-1].device
            parameters = [p for bucket in layout.buckets for p in bucket.parameters if bucket.device == last]
            self.lead = Lead(self.arrivals, parameters, lead, self.overlap.in_last_pass)

    @property
    def nbytes(self) -> tuple[int, ...]:
        return self.layout.nbytes

    def described(self, share: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's share of a checkpoint, with the memory orders of its pending gradients."""
        return {**share, "orders": self.layout.orders}

    def placed(self, share: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's share of a checkpoint with its pending gradients on the devices of their buckets.

        Raises:
            ValueError: pending gradients have another memory order.
        """
        layout, vectors = self.layout, share.get("vectors", [])
        if list(share.get("nbytes", ())) != list(layout.nbytes):
            return share  # (``take_share`` refuses pending gradients of other buckets)
        pending = any(vector is not None for vector in vectors)
        if pending and share.get("orders", [""] * len(layout.parameters)) != layout.orders:
            raise ValueError(
                "this state has gradients pending of parameters that lie in memory otherwise than this model's: bring "
                "it into the same memory format (torch.channels_last) before loading, or save after drain()"
            )
        pairs = zip(vectors, layout.buckets, strict=False)
        return {**share, "vectors": [None if v is None else v.to(bucket.device) for v, bucket in pairs]}

    def gradient_format(self) -> GradientFormat:
        self.prepare()  # (groups may have been added since the optimizer was wrapped)
        self.extrapolation.rounds = self.optimizer._async.config_for(self.layout.nbytes).weight_prediction
        return make_wire(self.layout, self._given.compression, self.tail, self._rank_group)

    # -- gradients out ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def left(
        self, worker: EagerWorker, grad_scale: torch.Tensor | None = None, overflow: torch.Tensor | None = None
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients of this step that have not been handed over, by bucket, for the worker.

        Args:
            worker: the worker.
            grad_scale: factor of all gradients, which is taken out; None: 1.
            overflow: shape (); other than 0: the whole step holds no gradient.

        Raises:
            ReplicaStateError: a gradient was changed after it had been handed over, or its samples were not recorded.
        """
        passed = max(1, self.overlap.passed)
        samples = self._samples(passed if worker.ready else 0) if self.tail.weighted else None
        self.overlap.disarm()
        try:
            self.watch.check(worker.gone, lambda index: self.layout.vector(index, self.before, samples))
        except ReplicaStateError as error:
            worker.whole.broken = str(error)  # half of the step has been handed over
            raise
        scale = self.before if grad_scale is None else self.before / grad_scale
        gone = worker.gone
        left = [index for index in range(len(self.layout)) if index not in gone]
        if not worker.ready:
            return dict.fromkeys(left)  # (a step that ends an interrupted one brings no gradient)
        if samples == 0:
            overflow = None  # (a scaler takes the mean of nothing, NaN, for one)
        if overflow is not None and not (self._empties_on_device and streams.gpu.holds(overflow)):
            if overflow:
                return dict.fromkeys(left)
            overflow = None
        vectors = {i: self._finite(i, self.layout.vector(i, scale, samples), overflow) for i in left}
        self.checks.send()
        if self.lead is not None:
            self.lead.end_step()
        return vectors

    def handed_over(self) -> None:
        """Forget a step whose gradients have all been handed over."""
        self.watch.clear()
        self.recorded.clear()
        self.arrivals.marker = None

    def record_samples(self, samples: int) -> None:
        """Record the samples of a backward pass that follows.

        Raises:
            ReplicaStateError: gradients of the step were handed over without them.
        """
        worker = self.optimizer._async.met
        if worker is not None and worker.gone:
            raise ReplicaStateError(
                "record_samples() after backward(): gradients of this step are on their way already. Call it before "
                "each backward()"
            )
        self.recorded.append(samples)

    def _samples(self, passes: int) -> int:
        """Return the samples of this step's gradient.

        Raises:
            ReplicaStateError: they were recorded for fewer backward passes.
        """
        if len(self.recorded) < passes:
            raise ReplicaStateError(
                f"weighting='samples', and the samples of {len(self.recorded)} of {passes} backward pass(es) are "
                f"recorded: call optimizer.record_samples(len(batch)) after zero_grad() and before each backward()"
            )
        return sum(self.recorded)

    def _bucket_ready(self, index: int) -> None:
        """Hand over a complete bucket, from a backward hook."""
        if torch.is_grad_enabled():  # (a backward pass with create_graph=True)
            with torch.no_grad():
                self._bucket_ready(index)
            return
        samples = self._samples(self.passes) if self.tail.weighted else None
        vector = self.layout.vector(index, self.before, samples)
        self.watch.handed(index, vector)
        worker = self.optimizer._async.worker
        if worker.wants_hyper:
            worker.foresee(self.hyperparameters())
        worker.hand_over(index, self._finite(index, vector))

    def _finite(self, index: int, vector: torch.Tensor, overflow: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return a bucket's vector, or None if it holds NaN or an infinity, which other ranks must not see.

        Args:
            index: number of the bucket.
            vector: its vector.
            overflow: on a GPU, other than 0 if the step holds no gradient.

        Raises:
            FloatingPointError: it is not finite, and ``nonfinite="raise"``.
        """
        if self._empties_on_device and streams.gpu.holds(vector):
            self.checks.empty_unless_finite(index, vector, overflow)
            return record_ready(vector)
        if overflow is not None and overflow:
            return None
        # One pass; the sum of very large finite numbers may be infinite too, so then each element is checked.
        if math.isfinite(vector.sum()) or torch.isfinite(vector).all():
            return record_ready(vector)
        if self._given.nonfinite == "raise":
            every = self._names(self.layout.parameters)
            names = [every[id(p)] for p in self.layout.buckets[index].parameters if not _is_finite(p.grad)]
            raise FloatingPointError(f"not finite: the gradients of {', '.join(names[:5])}")
        return None

    # -- rounds in --------------------------------------------------------------------------------------------

    def show(self, round_: ReducedRound) -> None:
        """Put a round's average into every ``p.grad``."""
        optimizer = self.optimizer
        frozen = hyperparameters.frozen(optimizer.param_groups, round_.hyper)
        sparse = issubclass(optimizer._wrapped_class, torch.optim.SparseAdam)
        with torch.no_grad():
            self.layout.set_gradients(round_, self.after, frozen, sparse)

    def apply(self, round_: ReducedRound) -> None:
        """Apply one round: its average gradient, its hyperparameters. Leaves p.grad as it was."""
        self.unshown += 1
        if round_.gradients == 0:
            return  # (it is empty; momentum and decay must not move the weights)
        parameters = self.layout.parameters
        own = [p.grad for p in parameters]
        try:
            self.show(round_)
            if self.round_transform is not None:
                self.round_transform([p for p in parameters if p.grad is not None])
            self.update(round_.hyper)
        finally:
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient

    def update(self, hyper: Hyper) -> None:
        """Take a step of the wrapped optimizer with a round's hyperparameters."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        own, hyper = hyperparameters.read(groups, self.counters), hyperparameters.without(hyper, self.counters)
        if own == hyper:
            self._step()
            return
        hyperparameters.write(groups, hyper)
        written = hyperparameters.read(groups)  # (a tensor may have rounded it)
        try:
            self._step()
        finally:
            hyperparameters.put_back(groups, own, written)

    def _step(self) -> None:
        optimizer = self.optimizer
        hooks = StepHooks(optimizer, None)
        hooks.run_pre_hooks()
        with (
            hyperparameters.noting_counters(optimizer.param_groups, self.counters),
            self.extrapolation.around_update(optimizer),
        ):
            hooks.run_update(optimizer._wrapped_class)
        hooks.run_post_hooks()

    # -- what the ranks have in common --------------------------------------------------------------------------

    def outside(self) -> list[tuple[str, int]]:
        return shared_models.outside(self.optimizer)

    def hyperparameters(self) -> Hyper:
        return hyperparameters.read(self.optimizer.param_groups, self.counters)

    def _names(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        """Return names by the parameters' id."""
        named = self.named or {}
        return {id(p): named.get(id(p), f"parameter {index}") for index, p in enumerate(parameters)}

    def fingerprint(self) -> tuple[list[str], list[int]]:
        optimizer, parameters = self.optimizer, self.parameters
        drop_made_state(optimizer)
        every = self._names(parameters)
        names = [f"{signature(every[id(p)], p)} {memory_order(p)}".rstrip() for p in parameters]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        place = {id(p): index for index, p in enumerate(parameters)}
        members = [[place[id(p)] for p in bucket.parameters] for bucket in self.layout.buckets]
        buckets = f"{len(members)} buckets ({zlib.crc32(str(members).encode()):08x})"
        compression = self._given.compression
        dtypes = (wire_dtype(compression, bucket.dtype) for bucket in self.layout.buckets)
        kind = (
            f"optimizer {optimizer._wrapped_class.__name__} with groups of {sizes}, {buckets}, "
            f"factors {self.before} and {self.after}, gradients as {eager.wire_label(compression, dtypes)}"
            f"{', round_transform' if self.round_transform is not None else ''}"
            f"{', named_buffers' if self.named_buffers else ''}"
        )
        leads = self.extrapolation.leads
        held = [
            (f"{STATE}{key} of {name}", checksum(value))
            for p, name in zip(parameters, names, strict=True)
            for key, value in [*optimizer.state.get(p, {}).items(), ("the lead", leads.get(p))]
            if isinstance(value, torch.Tensor)
        ]
        return (
            [kind, *names, *(name for name, _ in held)],
            [0, *(checksum(p) for p in parameters), *(value for _, value in held)],
        )

    def read_double(self) -> torch.Tensor:
        return flat_double(self.parameters)

    def buffers(self) -> Buffers | None:
        return self.named_buffers.buffers()

    def finish(self, worker: EagerWorker, flush: bool) -> None:
        left, self.unshown, self.shown, self.stepped = self.unshown, 0, None, 0
        if worker.copied_from is not None:
            self._take_over(worker, worker.copied_from)
            warnings.warn(
                f"ranks had different numbers of steps with synchronize(), so all take over the weights of rank "
                f"{worker.copied_from}, which had most: {INSTEAD} on every rank",
                stacklevel=users_line(),
            )
        elif left and self.one_by_one and self.round_transform is None:
            warnings.warn(
                f"drain() applied {left} round(s) that synchronize() never showed: {INSTEAD}", stacklevel=users_line()
            )
        passed = self.overlap.passed
        if flush:
            outcome = "stay in p.grad and are added to the next step, unless zero_grad() is called first"
            warn_of_open_passes(passed, self.passes, outcome)
        if not passed:
            self.overlap.disarm()  # (until zero_grad() the next backward pass may belong to another optimizer)

    def stop_hooks(self) -> None:
        self._remove_hooks()
        self.overlap.disarm()

    def _remove_hooks(self) -> None:
        self.overlap.remove()
        if self.lead is not None:
            self.lead.remove()

    def begin_step(self, worker: EagerWorker) -> None:
        """Expect the backward passes of a step, after ``zero_grad()``."""
        self.overlap.arm(worker.gone)
        if self.lead is not None:
            self.lead.begin_step()

    def _take_over(self, worker: EagerWorker, rank: int) -> None:
        """Take over a rank's weights and optimizer state. A collective."""
        parameters, state = self.parameters, self.optimizer.state
        held = [v for p in parameters for v in state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        known = self.extrapolation.leads
        take_over(worker, [*parameters, *held, *(known[p] for p in parameters if p in known)], rank)


def _is_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    return bool(torch.isfinite(gradient.coalesce().values() if gradient.is_sparse else gradient).all())
