"""Extrapolated updates in torch: each step of the wrapped optimizer is extended before its hooks run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of

LEAD = "hvd_async_lead"
"""Key of a parameter's lead in ``optimizer.state``: by how much the parameter is ahead of its updates."""


class _Moved(NamedTuple):
    """Parameters of one device, dtype and factor that a step moves, and their weights before it."""

    factor: float
    parameters: list[torch.Tensor]
    before: list[torch.Tensor]


class Extrapolation:
    """The extrapolated updates of one optimizer.

    The lead is in the optimizer's state, so it is saved, broadcast and compared with it. A parameter that a step does
    not move keeps its lead.

    Args:
        rounds: rounds to look ahead; 0 ends what leads there are. May be set at any time.
    """

    def __init__(self, rounds: float = 0.0) -> None:
        self.rounds = rounds
        self._spare: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def around_update(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Extend the update that is made inside, by a step without hooks, with the hyperparameters in force."""
        moved = self._moved(optimizer)
        yield
        for each in moved:
            self._extend(optimizer, each)

    @torch.no_grad()
    def _moved(self, optimizer: torch.optim.Optimizer) -> list[_Moved]:
        alike: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            ahead = factor(momentum_of(group), self.rounds)
            for p in group["params"]:
                if p.grad is not None and (ahead or LEAD in optimizer.state.get(p, ())):
                    alike[ahead, p.device, p.dtype].append(p)
        moved = []
        for (ahead, *_), parameters in alike.items():
            before = [torch.empty_like(p) if (kept := self._spare.get(p)) is None else kept for p in parameters]
            torch._foreach_copy_(before, parameters)
            moved.append(_Moved(ahead, parameters, before))
        return moved

    @torch.no_grad()
    def _extend(self, optimizer: torch.optim.Optimizer, moved: _Moved) -> None:
        state = optimizer.state
        # (an optimizer without state for a parameter has no momentum that could carry it; and some take a state that is
        # not empty for their own)
        pairs = [(p, before) for p, before in zip(moved.parameters, moved.before, strict=True) if state.get(p)]
        if not pairs:
            return
        parameters, before = map(list, zip(*pairs, strict=True))
        leads = [state[p].get(LEAD) for p in parameters]
        new = [torch.zeros_like(p) if lead is None else lead for p, lead in zip(parameters, leads, strict=True)]
        torch._foreach_sub_(before, parameters)
        torch._foreach_mul_(before, -moved.factor)  # now the new leads
        torch._foreach_sub_(new, before)  # now the old ones less these
        torch._foreach_sub_(parameters, new)
        for p, lead, spare in zip(parameters, before, new, strict=True):
            state[p][LEAD], self._spare[p] = lead, spare
