"""Extrapolated updates in torch: each step of the wrapped optimizer is extended before its hooks run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of

LEADS = "hvd_async_leads"
"""Key of ``state_dict()`` for the leads, by parameter in the order of the groups; None for a parameter without one."""


class _Moved(NamedTuple):
    """Parameters of one device, dtype and factor that a step moves, and their weights before it."""

    factor: float
    parameters: list[torch.Tensor]
    before: list[torch.Tensor]


class Extrapolation:
    """The extrapolated updates of one optimizer.

    A parameter that a step does not move keeps its lead.

    Args:
        rounds: rounds to look ahead; 0: updates stay as they are, and the next one forgets the leads. May be set at any
            time.

    Attributes:
        leads: by how much a parameter is ahead of its updates. They are state of the optimizer, but not in its
            ``state``: wrapped optimizers, and tools that walk it, expect their own entries there.
    """

    def __init__(self, rounds: float = 0.0) -> None:
        self.rounds = rounds
        self.leads: dict[torch.Tensor, torch.Tensor] = {}
        self._spare: dict[torch.Tensor, torch.Tensor] = {}

    def saved(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what ``load`` takes, for ``state_dict()``: copies of the leads, nothing if there are none."""
        if not self.leads:
            return {}
        found = (self.leads.get(p) for group in optimizer.param_groups for p in group["params"])
        return {LEADS: [None if lead is None else lead.clone() for lead in found]}

    def load(self, optimizer: torch.optim.Optimizer, saved: Sequence[torch.Tensor | None] | None) -> None:
        """Take back the leads that ``saved`` returned; None: a state without any."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = zip(parameters, saved or [None] * len(parameters), strict=True)
        self.leads = {p: lead.to(p, copy=True) for p, lead in pairs if lead is not None}

    @contextlib.contextmanager
    def around_update(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Extend the update that is made inside, by a step without hooks, with the hyperparameters in force."""
        if not self.rounds:
            self.leads.clear()
        with torch.no_grad():
            moved = self._moved(optimizer)
        yield
        if moved:
            with torch.no_grad():
                for each in moved:
                    self._extend(optimizer, each)

    def _moved(self, optimizer: torch.optim.Optimizer) -> list[_Moved]:
        alike: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            ahead = factor(momentum_of(group), self.rounds) if self.rounds else 0.0
            for p in group["params"] if ahead or self.leads else ():
                if p.grad is not None and (ahead or p in self.leads):
                    alike[ahead, p.device, p.dtype].append(p)
        moved = []
        for (ahead, *_), parameters in alike.items():
            before = [torch.empty_like(p) if (kept := self._spare.get(p)) is None else kept for p in parameters]
            torch._foreach_copy_(before, parameters)
            moved.append(_Moved(ahead, parameters, before))
        return moved

    def _extend(self, optimizer: torch.optim.Optimizer, moved: _Moved) -> None:
        # (an optimizer that has no state for a parameter has no momentum that could carry it)
        pairs = [(p, one) for p, one in zip(moved.parameters, moved.before, strict=True) if optimizer.state.get(p)]
        if not pairs:
            return
        parameters, before = map(list, zip(*pairs, strict=True))
        leads = [self.leads.get(p) for p in parameters]
        new = [torch.zeros_like(p) if lead is None else lead for p, lead in zip(parameters, leads, strict=True)]
        torch._foreach_sub_(before, parameters)
        torch._foreach_mul_(before, -moved.factor)  # now the new leads
        torch._foreach_sub_(new, before)  # now the old ones less these
        torch._foreach_sub_(parameters, new)
        for p, lead, spare in zip(parameters, before, new, strict=True):
            self.leads[p], self._spare[p] = lead, spare
