"""Verdict on a cell: the runs of all ranks, judged by the plain run of the same script."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvd_async.runtime.interfaces import Handle
from hvd_async.testing import Cluster, InjectedError, MemoryCollectives
from tests.conformance.crossings.bindings import SCRIPTS
from tests.conformance.crossings.table import ARMS, FALLS, MIDDLE, NORMS, STEPS, Cell, drop_of, steps_of
from tests.conformance.elastic_board import among_others, over_a_board, trained

SUMMED = {"float16", "bfloat16", "int32", "int64", "float32", "float64"}
"""Dtypes of vectors that the library can sum by Horovod. (bfloat16 by an alltoall.)"""
SENT = SUMMED - {"bfloat16"} | {"uint8", "int8", "int16"}
"""Dtypes that Horovod broadcasts in both frameworks."""
TOLERANCE = {"none": 2e-5, "float64": 1e-11, "bfloat16": 3e-2}
"""Relative and absolute, by the dtype of the parameters."""
FAR = 3.0
"""How much further from a plain run on all data a rank's weights may be than that run has come."""
APART = {"exact-diffusion": 2.0, "dpsgd": 1.15}
"""How much further apart ranks may be after the rate has fallen to a tenth than before, by algorithm."""
LEAP = 2.0
"""How much larger a step may be than a plain run's where weights are predicted."""
MEAN_KEPT = ("allreduce", "dpsgd", "exact-diffusion")
"""Algorithms under which weights that no rank trains keep their mean over the ranks, at each step."""
LIMIT = 240.0
"""Seconds that a cell may take: a few on a quiet machine, where Keras traces."""


class HorovodLike(MemoryCollectives):
    """Collectives in memory that take what Horovod takes."""

    def allreduce_sum(
        self, vector: Any, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        """Sum, as Horovod would."""
        _check(vector, name, SUMMED)
        handle = super().allreduce_sum(vector, name, process_set, keep, scale)
        return handle if keep else _InPlace(handle, vector)

    def broadcast(self, vector: Any, root: int, name: str, process_set: Any = None) -> Handle:
        """Broadcast, as Horovod would."""
        _check(vector, name, SENT)
        sent = vector + 0 if self.rank == root else vector  # (others may receive it after this rank has changed it)
        return _InPlace(super().broadcast(sent, root, name, process_set), vector)


class _InPlace:
    """A handle whose result is written to the vector that was given, where the framework can."""

    def __init__(self, handle: Handle, vector: Any) -> None:
        self._handle, self._vector, self.in_stages = handle, vector, handle.in_stages
        self.take = None if handle.take is None else self._take

    def _take(self) -> Any:
        assert self._handle.take is not None
        return self._written(self._handle.take())

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> Any:
        return self._written(self._handle.result())

    def _written(self, result: Any) -> Any:
        vector = self._vector
        if self.take is not None:
            return result  # (in the memory of the sum, as a late plane's)
        if isinstance(vector, torch.Tensor):  # (Horovod writes to tensors of inference mode too)
            with torch.inference_mode(vector.is_inference()):
                return vector.copy_(result)
        return result

    def seconds_to_poll(self) -> float | None:
        return self._handle.seconds_to_poll()


def like_horovod(collectives: MemoryCollectives) -> MemoryCollectives:
    """Return the same rank's, of the same plane, which take what Horovod takes."""
    kind = type("LikeHorovod", (HorovodLike, type(collectives)), {})
    return kind(collectives._board, collectives.rank, collectives.size)


def _check(vector: Any, name: str, dtypes: set[str]) -> None:
    dtype = getattr(vector.dtype, "name", str(vector.dtype).removeprefix("torch."))
    if dtype not in dtypes:
        raise InjectedError(f"{name}: Horovod does not take {dtype}")
    if not getattr(vector, "is_contiguous", lambda: True)():
        raise InjectedError(f"{name}: Horovod takes contiguous tensors only")


def run(cell: Cell, make: Callable[[Cell, int | None], Any]) -> tuple[Any, Sequence[Any]]:
    """Run a cell's script, plain and on all ranks; return the plain run, and of each rank its run or its error."""
    return make(cell, None).train(), run_ranks(cell, make)


def run_ranks(cell: Cell, make: Callable[[Cell, int | None], Any]) -> Sequence[Any]:
    """Run a cell's script on all ranks; return of each rank its run or its error."""
    done = [threading.Event() for _ in range(steps_of(cell))]

    def work(rank: int) -> Any:
        one = make(cell, rank)
        one.done = done
        try:
            return one.train()
        finally:
            for event in done:  # (also of a rank that has failed: no rank waits for it)
                event.set()

    if cell["middle"] == "elastic":
        return run_elastic(cell, make, done)
    *runs, last = Cluster(cell.ranks + (cell["set"] != "none"), wrap=like_horovod).outcomes(work, LIMIT)
    if cell["set"] == "none" or any(isinstance(one, BaseException) for one in (runs[0], last)):
        return [*runs, last]
    runs[0].problems += [f"outside of the process set {problem}" for problem in last.problems]
    return runs


def run_elastic(cell: Cell, make: Callable[[Cell, int | None], Any], done: list[threading.Event]) -> Sequence[Any]:
    """Run a cell's script with a change of the ranks in its middle, after which they are the same ones."""

    def first(rank: int) -> Any:
        one = make(cell, rank)
        one.done = done
        one.begin()
        one.state.sync()
        one.take_steps(range(MIDDLE[0] + 1))
        return one

    def rest(rank: int, one: Any) -> Any:
        one.after_reset()
        one.take_steps(range(MIDDLE[0] + 1, one.steps))
        return one.end()

    try:
        with over_a_board():
            jobs = trained(cell.ranks, first, LIMIT, wrap=like_horovod)
            return among_others(cell.ranks, jobs, lambda: None, rest, LIMIT, wrap=like_horovod)
    except Exception as error:  # noqa: BLE001  it is judged
        return [error]


def problems(cell: Cell) -> list[str]:
    """Run a cell's script, and return what does not hold."""
    script = SCRIPTS[cell.binding]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judged(cell, script.Run, script.equivalent(cell))


def _judged(cell: Cell, make: Callable[[Cell, int | None], Any], other: Cell) -> list[str]:
    """Return what does not hold; ranks' weights are to be those of the other cell."""
    plain, runs = run(cell, make)
    failed = [one for one in runs if isinstance(one, BaseException)]
    if failed:
        own = [one for one in failed if "on host host" not in str(one)] or failed
        return [f"raised {type(own[0]).__name__}: {own[0]}"]
    found = [problem for one in runs for problem in one.problems]
    arm, tolerance = ARMS[cell.arm], TOLERANCE[cell["dtype"]]
    if cell.binding != "torch" and cell["weights"] in NORMS:
        tolerance = max(tolerance, 1e-6)  # (the constraint changes weights a little whenever it is applied)
    alike = {"rtol": tolerance, "atol": tolerance}
    for one in runs:
        if not np.isfinite(one.path).all():
            found.append("weights are not finite")
        if one.drained != runs[0].drained:
            found.append("replicas differ after a drain, or in consensus()")
    if cell.plain:
        for one in runs:
            for step, (own, due) in enumerate(zip(one.path, plain.path, strict=True)):
                if not np.allclose(own, due, **alike):
                    found.append(
                        f"weights are not the plain run's after step {step}: {np.abs(own - due).max():.3g} off"
                    )
                    break
            for own, due in zip(one.averages, plain.averages, strict=True):
                if not np.allclose(own, due, **alike):
                    found.append(f"averages are not the plain run's: {np.abs(own - due).max():.3g} off")
    else:
        found += _near(cell, plain, runs)
    # (when ranks change, averages on their way may have arrived or not)
    chance = arm.late or (cell["middle"] == "elastic" and cell.moved_by_ends)
    if other.id != cell.id and not cell.plain and not chance:
        slack = 10 * tolerance
        if cell.binding != "torch":  # (some of Keras' sums are of float32; they decide how a message is rounded)
            slack = max(slack, 1e-6 if cell["travel"] == "none" else 2e-3)
        for one, due in zip(runs, run_ranks(other, make), strict=True):
            if isinstance(due, BaseException):
                found.append(f"{other.id} raises {type(due).__name__}: {due}")
            elif not np.allclose(one.path, due.path, rtol=slack, atol=slack):
                off = np.abs(np.array(one.path) - due.path).max()
                found.append(f"weights are not as in {other.id}: {off:.3g} off")
    for one in runs:
        if one.rates != plain.rates and not (arm.late and cell.binding != "torch"):  # (Keras counts rounds)
            found.append("learning rates or momenta are not the plain run's")
    overwritten = cell["averages"] == "ema-overwrite"  # (by Keras, frozen ones too)
    if runs[0].frozen and arm.mixes and arm.algorithm in MEAN_KEPT and not overwritten:
        kept = np.mean([one.frozen[0] for one in runs], axis=0)
        if not np.allclose(runs[0].frozen[1], kept, rtol=1e-4 + tolerance, atol=1e-4 + tolerance):
            found.append("a frozen parameter is the ranks' mean after a drain: it has moved")
    if cell.refuses_checkpoints and not any(one.refused for one in runs):
        found.append("no rank refuses a checkpoint while messages of other hosts are on their way")
    undisturbed = cell["travel"] == cell["middle"] == cell["looks"] == "none"
    if cell["training"] == "freeze" and arm.algorithm in ("exact-diffusion", "noloco") and undisturbed:
        held = np.array([one.frozen[0] for one in runs])
        low, high = held.min(axis=0) - 1e-5, held.max(axis=0) + 1e-5
        slack = 0.05 * (high - low) * (arm.algorithm == "noloco")  # (its slow weights are behind what ranks have)
        if any((own < low - slack).any() or (own > high + slack).any() for one in runs for own in one.resting):
            found.append("a frozen parameter is only mixed: it is not between what ranks had")
    pushes = arm.algorithm in ("sgp", "osgp")
    if cell["training"] != "unused-on-a-rank" and (arm.eager or pushes or cell["averages"] == "loop"):
        # (else hooks see a rank's own steps, and ranks may differ by more than a step changes)
        found += _averages_in_range(runs)
    found += _statistics(runs, tolerance)
    found += _counts(cell, runs)
    return list(dict.fromkeys(found))


def _near(cell: Cell, plain: Any, runs: Sequence[Any]) -> list[str]:
    """Ranks stay near a plain run that sees all their data, and no further apart when the rate has fallen."""
    found, gain, arm = [], plain.gain, ARMS[cell.arm]
    path = np.array([one.path for one in runs])  # [rank, step, weight]
    due = np.array(plain.path)
    moved = np.abs(due - due[0]).max() + 0.05
    far = np.abs(path - due).max()
    if far > FAR * moved and arm.algorithm != "diloco":  # (whose outer momentum is that of few, long periods)
        found.append(f"weights are far from a plain run on all data: {far:.3g}, which moved by {moved:.3g}")
    if cell["training"] == "unused-on-a-rank" and cell["rate"] == "none" and arm.options.get("quasi_global"):
        last = steps_of(cell) - 8
        moved, expected = (path.mean(axis=0)[last] - due[0])[gain], (due[last] - due[0])[gain]
        share = float(moved @ expected / (expected @ expected))
        if not 0.0 < share < 1.1:  # (it moves less, since ranks without a gradient have no momentum)
            found.append(f"a parameter that one rank trains moves {share:.3g} times as far as a plain run's")
    leap = np.abs(np.diff(path, axis=1)).max() / (np.abs(np.diff(due, axis=0)).max() + 1e-9)
    jumps = cell["averages"] in ("ema-overwrite", "lookahead") and cell["optimizer"] in ("none", "momentum")
    if jumps and arm.name == "eager-ahead" and leap > LEAP:
        found.append(f"weights jump further than a plain run's: {leap:.3g} times")
    if cell["rate"] in FALLS and steps_of(cell) > STEPS:
        apart, drop = np.abs(path - path.mean(axis=0)).max(axis=(0, 2)), drop_of(cell)
        before, after = apart[drop - 8 : drop + 1].max(), apart[drop + 1 :].max()
        if after > APART[arm.algorithm] * before:
            found.append(f"ranks are further apart after the rate has fallen: {after:.3g}, before {before:.3g}")
    return found


def _averages_in_range(runs: Sequence[Any]) -> list[str]:
    """Moving averages are among the weights that there were on any rank, give or take what a step changes."""
    path = np.array([one.path for one in runs])
    steps = np.abs(np.diff(path, axis=1)).max(axis=(0, 1))
    low, high = path.min(axis=(0, 1)) - 2 * steps - 0.02, path.max(axis=(0, 1)) + 2 * steps + 0.02
    averages = [average for one in runs for average in one.averages]
    if any(((average < low) | (average > high)).any() for average in averages):
        return ["a moving average is not among the weights that there were"]
    return []


def _statistics(runs: Sequence[Any], tolerance: float) -> list[str]:
    """A drain leaves all ranks the mean of their batch-norm statistics."""
    for seen in zip(*(one.statistics for one in runs), strict=True):
        due = np.mean([before for before, _ in seen], axis=0)
        if any(not np.allclose(after, due, rtol=1e-4 + tolerance, atol=1e-4 + tolerance) for _, after in seen):
            return ["batch-norm statistics after a drain are not the ranks' mean"]
    return []


def _counts(cell: Cell, runs: Sequence[Any]) -> list[str]:
    """No gradient is lost, and rounds are counted."""
    arm, found = ARMS[cell.arm], []
    if arm.eager and cell["middle"] not in ("resume", "cut", "remade", "zeroed-discarded"):
        produced = sum(one.stats.gradients_produced for one in runs)
        applied = [one.stats.gradients_applied for one in runs]
        if arm.late and cell["middle"] == "elastic":  # (a rank that is behind takes weights over, and applies fewer)
            applied = [max(applied)]
        if any(one != produced for one in applied) or produced != steps_of(cell) * cell.ranks:
            found.append(f"gradients are lost: {produced} were produced")
    if any(one.rounds < 1 for one in runs) and arm.wrapper != "LeaderOptimizer":  # (a short run may end before a pull)
        found.append("opt.rounds is 0")
    elif arm.counts and any(one.rounds != steps_of(cell) for one in runs):
        found.append(f"opt.rounds is {runs[0].rounds} after {steps_of(cell)} steps")
    return found
