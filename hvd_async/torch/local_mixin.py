"""What the wrapped torch optimizers have in common whose ranks have weights of their own: stepping, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_async.optimizers.local import LocalState, LocalWrapped
from hvd_async.torch.base import TorchWrapped, refuse_a_step_for_state
from hvd_async.torch.streams import bind_training_stream
from hvd_async.torch.tensors import checksum, consensus_distance, signature, unify_buffers

MIXED = {torch.float32, torch.float64}
"""What weights must be for their mixing to lose nothing."""


class LocalSettings(LocalState):
    """What the wrapper was given, and what it keeps between calls.

    Attributes:
        named: parameters' names by id; None if none were given.
        named_buffers: those that are to agree after a drain.
        buffer_policy: how.
    """

    named: dict[int, str] | None = None
    named_buffers: list[tuple[str, torch.Tensor]]
    buffer_policy: str = "average"


class LocalMixin(LocalWrapped, TorchWrapped):
    """Methods of a wrapped torch optimizer."""

    _async: LocalSettings

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, and let other ranks' weights move this one's.

        Gossip sends the weights to neighbours and mixes in theirs: sgp and dpsgd wait for the neighbours' messages of
        this step; osgp for those that are ``max_staleness`` steps old; adpsgd for nobody, but after ``max_local_steps``
        without an averaging. Ranks that follow a leader wait for nobody.

        Args:
            closure: evaluated once, before the step.

        Returns:
            The closure's value, None without one.

        Raises:
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ.
            ReplicaStateError: an earlier step was broken off here, or a drain, which is to be called again.
            FloatingPointError: the step has made a weight NaN or infinite; nothing was sent.
            HorovodInternalError: Horovod failed, or a rank is lost (the message names it).
        """
        refuse_a_step_for_state()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        worker = self._async_worker()
        self._async_before_step(worker, loss)
        worker.check_step()
        self._async_kind()  # (a parameter may have been unfrozen)
        with self._async_updating(), torch.no_grad():
            if worker.weight != 1.0:
                torch._foreach_mul_(self._async_parameters(), worker.weight)
            before = self._async_read() if worker.wants_before else None
            self._async_plain_step()
            after = self._async_read()
            if not torch.isfinite(after.sum()) and not torch.isfinite(after).all():
                raise FloatingPointError(self._async_not_finite())
            self._async_before_mix(worker)
            self._async_write(worker.mix(after if before is None else before, after))
        return loss

    def _async_before_step(self, worker: Any, loss: Any) -> None:
        """What there is to tell the worker first; ``loss`` is the closure's."""

    def _async_before_mix(self, worker: Any) -> None:
        """What there is to do between the wrapped optimizer's step and the mixing."""

    def _async_plain_step(self) -> None:
        """The wrapped optimizer's."""
        self._wrapped_class.step(self)

    step.hooked = True  # type: ignore[attr-defined]  # torch's step hooks run in the wrapped class's step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As in Horovod; gradients add up in ``p.grad`` until ``step()``, so there is nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under "hvd_async" what this rank needs to go on.

        After ``drain()`` rank 0's is complete and resumes at any number of ranks; after ``cut()`` each rank's is its
        own share, for as many ranks, beside the model's weights on that rank.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        return {**super().state_dict(), "hvd_async": self._async_share()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back a state, also a plain optimizer's; on every rank, before the first step or after a ``drain()``.

        Raises:
            ValueError: the state is another rank's, or of a job of another size.
            ReplicaStateError: messages of this run are on their way.
        """
        state_dict = dict(state_dict)
        share = state_dict.pop("hvd_async", None)
        if share is not None:
            device = self._async_parameters()[0].device
            copies = {edge: copy.to(device) for edge, copy in share.get("copies", {}).items()}
            self._async_take_share({**share, "copies": copies})
        super().load_state_dict(state_dict)

    # -- for LocalWrapped ------------------------------------------------------------------------------------

    def _async_worker(self) -> Any:
        worker = super()._async_worker()
        bind_training_stream(worker.engine, self._async_parameters())
        return worker

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """Both threads change what the ranks exchange, so both use this one's stream."""
        bind_training_stream(engine, self._async_parameters())
        return super()._async_make(engine, finish)

    @torch.no_grad()
    def _async_read(self) -> torch.Tensor:
        kind = self._async_kind()
        return torch.cat([p.detach().reshape(-1).to(kind) for p in self._async_parameters()])

    @torch.no_grad()
    def _async_write(self, weights: torch.Tensor) -> None:
        parameters = self._async_parameters()
        parts = weights.split([p.numel() for p in parameters])
        pairs = [(p, part.view_as(p)) for p, part in zip(parameters, parts, strict=True)]
        alike = [pair for pair in pairs if pair[0].is_contiguous()]
        if alike:
            torch._foreach_copy_([p for p, _ in alike], [part for _, part in alike])
        for parameter, part in pairs:
            if not parameter.is_contiguous():  # (one of them, channels last say, would make all copies single ones)
                parameter.copy_(part)

    def _async_parameters(self) -> list[torch.Tensor]:
        """Those that are mixed: of others that are frozen, ranks keep their own."""
        return [p for p in super()._async_parameters() if p.requires_grad or p.dtype in MIXED]

    def _async_kind(self) -> torch.dtype:
        """Of the vector of weights.

        Raises:
            ValueError: mixing would lose what a parameter learns.
        """
        kinds = {p.dtype for p in self._async_parameters()}
        if kinds <= MIXED:
            return torch.float64 if torch.float64 in kinds else torch.float32
        other = ", ".join(sorted(str(kind) for kind in kinds - MIXED))
        raise ValueError(
            f"a parameter of dtype {other} cannot be mixed without losing what it learns: keep weights in float32 and "
            f"compute in half precision by torch.autocast; compression= makes messages small"
        )

    def _async_check_parameters(self) -> None:
        """Refuse parameters whose mixing would lose them.

        Raises:
            ValueError: with a hint.
        """
        self._async_kind()
        devices = {str(p.device) for p in self._async_parameters()}
        if len(devices) > 1:
            raise ValueError(
                f"parameters on {', '.join(sorted(devices))}: ranks' weights travel as one vector: keep them on one"
            )

    def _async_fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        parameters = self._async_parameters()
        named = self._async.named or {}
        names = [signature(named.get(id(p), f"parameter {i}"), p) for i, p in enumerate(parameters)]
        kind = f"optimizer {self._wrapped_class.__name__}{', weights as after cut()' if resumed else ''}"
        return [kind, *names], [0, *(0 if resumed else checksum(p) for p in parameters)]

    def _async_unify(self) -> None:
        if self._async.buffer_policy != "local":
            self._async_unify_by(self._async.buffer_policy, self._async.sharers.ranks[0])

    def _async_unify_by(self, policy: str, root: int) -> None:
        state = self._async
        if state.named_buffers:
            unify_buffers(self._async_worker(), state.named_buffers, policy, root)

    def _async_keep_buffers(self) -> Callable[[], None]:
        kept = [(buffer, buffer.clone()) for _, buffer in self._async.named_buffers]

        def put_back() -> None:
            with torch.no_grad():
                for buffer, own in kept:
                    buffer.copy_(own)

        return put_back

    def _async_distance(self) -> float:
        return consensus_distance(self._async_worker(), self._async_parameters())

    def _async_not_finite(self) -> str:
        named = self._async.named or {}
        bad = [i for i, p in enumerate(self._async_parameters()) if not torch.isfinite(p).all()]
        names = ", ".join(named.get(id(self._async_parameters()[i]), f"parameter {i}") for i in bad[:5])
        return (
            f"this rank's step has made weights NaN or infinite ({names}), which would spread to all ranks; nothing "
            f"was sent. Lower the learning rate, clip gradients, or step by a torch.amp.GradScaler"
        )
