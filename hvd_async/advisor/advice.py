"""Advice from a trace: its stragglers, the speed of each mode, and the recommended mode. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvd_async.advisor.prediction import BASES, EVERY, MODES, YARDSTICK, Mode, Prediction, Risk, named_modes, predict
from hvd_async.algorithms.eager.quorum import waits_for_all
from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.simulation.network import Network, ring_bytes
from hvd_async.traces.format import DDP, FSDP, SYNCHRONOUS, Header, Trace

# -- stragglers --------------------------------------------------------------------------------------------------------
# Stragglers follow from each rank's own work, so that a rank that is late because it had to wait is not blamed: if all
# ranks wait for all in a step, they wait for the rank with the most work of its own.


Times = NDArray[np.float64]
BALANCED = 0.05
"""Share of a step lost to waiting below which ranks count as balanced."""
ALWAYS = 0.6
"""Share of the lost time at or above which a rank counts as a permanent straggler."""


class Culprits(NamedTuple):
    """Ranks that others wait for.

    Attributes:
        work: mean seconds of a rank's own work per step, by rank.
        last: share of the steps in which each rank had the most work.
        held: [culprit, waiting rank]: seconds per step by which the culprit delays the other, if all wait for all.
        lost: share of the slowest rank's time that an average rank would wait.
        waited: mean seconds per step that each rank has waited in the trace.
        slow: the permanent straggler; None where stragglers are random, or there are none.
    """

    work: Times
    last: Times
    held: Times
    lost: float
    waited: Times
    slow: int | None

    @property
    def blame(self) -> Times:
        """Share of all waiting that each rank causes; zeros if no rank waits."""
        total = self.held.sum()
        shares: Times = self.held.sum(axis=1) / total if total else np.zeros(len(self.work))
        return shares

    @property
    def lines_up(self) -> Times:
        """Factor by which the slow rank's work is to shrink for it to be as fast as the others; 1 for other ranks."""
        found: Times = np.ones(len(self.work))
        if self.slow is not None:
            found[self.slow] = np.delete(self.work, self.slow).mean() / self.work[self.slow]
        return found

    @property
    def balanced(self) -> bool:
        """Whether ``lost`` is below ``BALANCED``."""
        return self.lost < BALANCED

    def text(self, host: str | None = None) -> str:
        """Return a summary in a sentence or two.

        Args:
            host: of the slow rank.
        """
        if self.balanced:
            return f"The ranks are balanced: {self.lost:.0%} of a step would be lost to waiting for the slowest rank."
        if self.slow is not None:
            own, others = self.work[self.slow], np.delete(self.work, self.slow).mean()
            where = f" on host {host}" if host else ""
            return f"Rank {self.slow}{where} is slow: {own:.3g} s of its own work a step, the others {others:.3g} s."
        most = int(self.blame.argmax())
        return (
            f"The stragglers are random: no rank causes more than {self.blame[most]:.0%} of the waiting (rank {most})."
        )


def find_culprits(work: Times, waits: Times) -> Culprits:
    """Return the ranks that others wait for.

    Args:
        work: seconds of each rank's own work, [steps, ranks].
        waits: seconds that each rank has waited, [steps, ranks].
    """
    steps, ranks = work.shape
    last, most = work.argmax(axis=1), work.max(axis=1)
    held = np.zeros((ranks, ranks))
    np.add.at(held, last, (most[:, None] - work) / steps)
    lost = float(1 - work.mean() / most.mean())
    first = int(held.sum(axis=1).argmax())
    alone = ranks > 1 and held[first].sum() >= ALWAYS * held.sum() and lost >= BALANCED
    return Culprits(
        work=work.mean(axis=0),
        last=np.bincount(last, minlength=ranks) / steps,
        held=held,
        lost=lost,
        waited=waits.mean(axis=0),
        slow=first if alone else None,
    )


# -- the network -------------------------------------------------------------------------------------------------------
# Latency and bandwidth of the network are given, or fitted from a trace in which all ranks wait for all.


LATENCY = 0.0003
"""Default seconds of a message between a rank and the coordinator, one way."""
CYCLE = 0.001
"""Default period, s, in which Horovod starts collectives (``HOROVOD_CYCLE_TIME``)."""
SMALL = 1_000_000
"""Bytes of gradients up to which the time of an allreduce is attributed to software, not to the link."""


class Given(msgspec.Struct, frozen=True):
    """Parameters of the network that the user knows; None: unknown.

    Attributes:
        latency_s: of a message, one way.
        bandwidth_bytes_s: of a rank's link, each way at once.
    """

    latency_s: float | None = None
    bandwidth_bytes_s: float | None = None


class Link(NamedTuple):
    """Simulated network.

    Attributes:
        network: its parameters.
        allreduce_s: seconds of an allreduce of the gradients in the trace; None: unknown.
        origin: source of the parameters, human-readable.
    """

    network: Network
    allreduce_s: float | None
    origin: str


def read_given(file: Path) -> Given:
    """Read a JSON file with ``latency_s`` and ``bandwidth_bytes_s``; other fields are ignored.

    Raises:
        ValueError: the file does not have these fields, or a number is not above 0.
    """
    try:
        given = msgspec.json.decode(file.read_bytes(), type=Given)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} must be JSON with latency_s or bandwidth_bytes_s: {error}") from error
    for name, value in (("latency", given.latency_s), ("bandwidth", given.bandwidth_bytes_s)):
        if value is not None and not value > 0:
            raise ValueError(f"the network's {name} must be above 0, got {value:g}: correct it, or leave it out")
    return given


def allreduce_seconds(trace: Trace) -> float | None:
    """Return the seconds of an allreduce of a trace's gradients: the median wait of the rank that arrived last.

    None if ranks do not all wait for all.
    """
    return float(np.median(trace.waits.min(axis=1))) if trace.synchronous and trace.ranks > 1 else None


def fit(trace: Trace, given: Given = Given()) -> Link:  # noqa: B008  immutable
    """Return the network on which to simulate a trace's job.

    Args:
        trace: of the job.
        given: known parameters.
    """
    size, ranks = trace.headers[0].parameter_bytes, trace.ranks
    latency = LATENCY if given.latency_s is None else given.latency_s
    found = allreduce_seconds(trace)
    sent = ring_bytes(size, ranks)
    bandwidth = float("inf") if given.bandwidth_bytes_s is None else given.bandwidth_bytes_s
    cycle = 0.0 if trace.headers[0].algorithm in (DDP, FSDP) else CYCLE
    origin = f"latency {1e3 * latency:.3g} ms ({'assumed' if given.latency_s is None else 'given'})"
    operation = 0.0
    if found is None:
        known = "given" if given.bandwidth_bytes_s is not None else "unknown: assumed infinite, so gains are optimistic"
        origin += f"; bandwidth {known} (it cannot be fitted from the waits of this mode)"
    else:
        # The wait begins with messages to and from the coordinator, or with half of Horovod's cycle.
        rest = max(found - (cycle / 2 + (2 * latency if trace.headers[0].options else 0.0)), 0.0)
        if given.bandwidth_bytes_s is not None:
            operation = max(rest - sent / bandwidth, 0.0)
            origin += f"; bandwidth {bandwidth / 1e6:.4g} MB/s (given)"
        elif size > SMALL and rest > 0:
            bandwidth = sent / rest
            origin += f"; bandwidth {bandwidth / 1e6:.4g} MB/s (fitted: an allreduce took {1e3 * found:.3g} ms)"
        else:
            operation = rest
            origin += f"; {1e3 * found:.3g} ms per allreduce of any size (fitted)"
    network = Network(latency=latency, bandwidth=bandwidth, cycle=cycle, operation=operation)
    return Link(network, found, origin)


# -- the advice --------------------------------------------------------------------------------------------------------


WORTH = 1.1
"""Factor of speed that a mode of a higher risk must gain."""


class Choice(NamedTuple):
    """Recommended mode.

    Attributes:
        prediction: of the mode.
        reason: for the recommendation, in a sentence.
    """

    prediction: Prediction
    reason: str


SCREENED = 2
"""Simulated jobs by which the modes for a closer look are chosen."""
OPTIONS = ("quorum", "pace", "average_every")
"""Options of a recorded job that its simulation has too."""
BEST = 4
"""Number of modes that get a closer look."""
EXPECTED: Mapping[bool, str] = {True: "adpsgd", False: "local"}
"""Mode that docs/choosing.md names: for a rank that is always slow, and for random stragglers."""


class Advice(NamedTuple):
    """Advice on a trace.

    Attributes:
        trace: of the run.
        culprits: ranks that others wait for.
        link: the simulated network.
        predictions: of the yardstick (see ``base``), then of the other modes, fastest first.
        best: the fastest modes but leaders', fastest first.
        own: of the mode that the trace was recorded under; None if it cannot be simulated.
        choices: best mode of each risk that is worth it, fastest last; empty if the yardstick is as fast.
        warnings: reasons why this trace may mislead, in sentences.
        unknown: limits of any advice, in sentences.
    """

    trace: Trace
    culprits: Culprits
    link: Link
    predictions: Sequence[Prediction]
    own: Prediction | None
    best: Sequence[Prediction]
    choices: Sequence[Choice]
    warnings: Sequence[str]
    unknown: Sequence[str]

    @property
    def base(self) -> str:
        """Name of the yardstick of all modes, in which ranks wait for all: Horovod, or the job's own library."""
        return base_of(self.trace)

    @property
    def bound(self) -> float:
        """Gain over the yardstick if no rank waited: the upper bound."""
        return float((1 / self.culprits.work).mean() / self.predictions[0].steps_per_s.mean)

    @property
    def fixed(self) -> float:
        """Gain over the yardstick if the slow rank were as fast as the others: the job needs no other mode for it."""
        work, seconds = self.trace.work, 1 / self.predictions[0].steps_per_s.mean
        saved = work.max(axis=1).mean() - (work * self.culprits.lines_up).max(axis=1).mean()
        return float(seconds / max(seconds - saved, 1e-9))


def advise(
    trace: Trace,
    given: Given = Given(),  # noqa: B008  immutable
    modes: str = EVERY,
    steps: int | None = None,
    resamples: int = 8,
    seed: int = 0,
    everything: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Return the advice on a trace.

    With more modes than ``BEST``, all are simulated ``SCREENED`` times, and the fastest ones ``resamples`` times.

    Args:
        trace: of a run.
        given: known parameters of the network.
        modes: names of the modes to try, separated by commas.
        steps: of each simulated job; None: as many as the trace has, at most 200, fewer with more than 4 ranks.
        resamples, seed: see ``predict``.
        everything: simulate every mode ``resamples`` times.
        progress: called with a line before each part that takes seconds.

    Raises:
        ValueError: a mode is unknown, or there are fewer than two ranks.
    """
    if trace.ranks < 2:
        raise ValueError("the trace is of a single rank, which waits for no other: record a job of several ranks")
    link, tried = fit(trace, given), named_modes(trace.ranks, modes)
    recorded = mode_of(trace.headers[0])
    known = recorded is None or any(recorded.is_as(mode) for mode in (YARDSTICK, *tried))
    also = [] if recorded is None or known else [recorded]
    every = [*tried, *also]
    length = steps or min(trace.steps, max(40, min(200, 800 // trace.ranks)))  # (a step of gossip costs ranks squared)

    def simulate(some: Sequence[Mode], count: int) -> list[Prediction]:
        progress(f"simulating {len(some)} modes of {trace.ranks} ranks, {count} jobs of {length} steps each")
        size = trace.headers[0].parameter_bytes
        return predict(trace.work, link.network, size, some, length, count, seed, trace.local_size)

    def fastest(some: Sequence[Prediction]) -> list[Prediction]:
        ranked = sorted(some, key=lambda each: -each.gain.mean)
        others = [each for each in ranked if each.mode.risk is not Risk.PULLED] or ranked
        chosen = [each.prediction for each in choose(found[0], some)]
        picked = [*chosen, *(each for each in others if each not in chosen)][:BEST]
        return [each for each in ranked if each in picked]

    screens = not everything and len(every) > BEST and resamples > SCREENED
    found = simulate(every, SCREENED if screens else resamples)
    if screens:
        picked = fastest(found[1 : 1 + len(tried)])
        base, *closer = simulate([*(each.mode for each in picked), *also], resamples)
        again = {each.mode.name: each for each in closer}
        found = [base, *(again.get(each.mode.name, each) for each in found[1:])]
    own = next((each for each in found if recorded is not None and each.mode.is_as(recorded)), None)
    others = sorted(found[1 : 1 + len(tried)], key=lambda each: -each.gain.mean)
    return Advice(
        trace=trace,
        culprits=find_culprits(trace.work, trace.waits),
        link=link,
        predictions=[found[0], *others],
        own=own,
        best=fastest(others),
        choices=choose(found[0], others, base_of(trace)),
        warnings=warnings(trace),
        unknown=unknown(trace, link),
    )


def expected(advice: Advice) -> Mode | None:
    """Return the mode that docs/choosing.md names for this job; None if its ranks are balanced."""
    if advice.culprits.balanced:
        return None
    return next(mode for mode in MODES if mode.name == EXPECTED[advice.culprits.slow is not None])


def base_of(trace: Trace) -> str:
    """Return the name of the yardstick for a trace."""
    return BASES.get(trace.headers[0].algorithm, "synchronous SGD")


def mode_of(header: Header) -> Mode | None:
    """Return the mode that a trace was recorded under; None if it cannot be simulated."""
    options = {name: header.options[name] for name in OPTIONS if header.options.get(name)}
    if header.algorithm in SYNCHRONOUS:
        return YARDSTICK
    if header.options.get("local_size", 1) != 1 or header.options.get("hierarchical"):
        return None  # (hosts that step together are not simulated)
    if options.get("pace") == "steps":  # (the default)
        del options["pace"]
    name = header.algorithm
    family = ALGORITHMS[name].family if name in ALGORITHMS else None
    if family is None or (family == "eager" and "quorum" not in options):
        return None
    if family == "eager":
        risk, name = Risk.NONE if waits_for_all(options["quorum"], header.ranks) else Risk.LATE, str(options["quorum"])
    elif family == "gossip":
        risk, options = Risk.OWN, {k: v for k, v in options.items() if k == "average_every" and isinstance(v, int)}
    else:
        risk, options = Risk.PULLED, {}
    return Mode(name, header.algorithm, "", risk, options=options)


def choose(base: Prediction, others: Sequence[Prediction], name: str = "synchronous SGD") -> list[Choice]:
    """Return the best mode of each risk, least risk first, if it is ``WORTH`` times as fast as modes of lower risk.

    It must be so in every resample: the lowest gain counts.

    Args:
        base: of the yardstick.
        others: of the other modes.
        name: of the yardstick.
    """
    found: list[Choice] = []
    before = 1.0
    for risk in Risk:
        best = max((each for each in others if each.mode.risk == risk), key=lambda each: each.gain.low, default=None)
        if best is None or best.gain.low < before * WORTH:
            continue
        waits = f"a rank waits {1e3 * best.wait_s:.1f} ms in a step, not {1e3 * base.wait_s:.1f}"
        found.append(Choice(best, f"{best.gain.mean:.2f} times the steps per second of {name}; {waits}"))
        before = best.gain.mean
    return found


def warnings(trace: Trace) -> list[str]:
    """Return the reasons why a trace may mislead, in sentences."""
    algorithm, found = trace.headers[0].algorithm, []
    if algorithm == FSDP:
        found.append(
            "Memory: under FSDP a rank holds a part of the model, under each mode here all of it, with its gradients"
            f" and the optimizer's state: {trace.headers[0].parameter_bytes / 1e6:.4g} MB of weights alone. FSDP's"
            " gathers and scatters of a step are simulated as one allreduce that takes as long."
        )
    if not trace.synchronous and not trace.waits.any():
        found.append("Waiting: none was seen. If ranks wait inside their computation, it counts as their work.")
    if not all(header.synchronized for header in trace.headers):
        cure = "FSDP's waits on a GPU are not seen" if algorithm == FSDP else "record with --synchronize"
        found.append(f"Times on the GPU: it was not synchronized, so they are not meaningful; {cure}.")
    if np.ptp([header.parameter_bytes for header in trace.headers]):
        found.append("The size of the model: ranks do not agree on it; rank 0's was used.")
    return found


def unknown(trace: Trace, link: Link) -> list[str]:
    """Return the limits of the advice, in sentences."""
    found = [
        "Accuracy: steps per second are not seconds to an accuracy. The cost of modes in accuracy was measured in other"
        " trainings (docs/choosing.md); train yours with two seeds.",
        f"The spread is over resamples of these {trace.steps} steps. Rarer or later events are not in it.",
        "Other loads: ranks that share cores, disks or links with each other, or with other jobs, are faster or slower"
        " under another mode, since they then compute at other times.",
        f"Communication is simulated after the computation, in one piece: what {base_of(trace)} or EagerOptimizer hides"
        " behind the backward pass is not known. A pause, such as an evaluation, counts as computation unless it was"
        " skipped.",
        "Input: batches that are made in the background (tf.data, a DataLoader's workers) while a rank waits for others"
        " count as work only where the rank waits for them too: with less waiting that time shows, and gains are"
        " smaller.",
        f"The network: {link.origin}.",
    ]
    if trace.clocks_ahead is None:
        found.append("The clocks of the hosts: nothing here depends on them, but a picture of the ranks side by side.")
    return found
