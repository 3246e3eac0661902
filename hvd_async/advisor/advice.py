"""Puts together what a trace says: who makes whom wait, what each mode would bring, and which one to take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvd_async.advisor.culprits import Culprits, find_culprits
from hvd_async.advisor.links import Given, Link, fit
from hvd_async.advisor.modes import EVERY, YARDSTICK, Mode, Risk, named_modes
from hvd_async.advisor.prediction import Prediction, predict
from hvd_async.algorithms.eager.quorum import waits_for_all
from hvd_async.simulation.names import GOSSIP, LEADERS
from hvd_async.traces.format import HOROVOD, Header
from hvd_async.traces.reader import Trace

WORTH = 1.1
"""How many times as quick a mode must be for the next risk."""


class Choice(NamedTuple):
    """A mode to take.

    Attributes:
        prediction: of it.
        reason: why, in a sentence.
    """

    prediction: Prediction
    reason: str


class Advice(NamedTuple):
    """All that a trace says.

    Attributes:
        trace: what was read.
        culprits: who makes whom wait.
        link: the network that was simulated.
        predictions: Horovod's first, then the others', the quickest first.
        own: of the mode that the trace was recorded under; None where it cannot be simulated.
        choices: the best mode of each risk that is worth it, the last of which is the quickest; none where Horovod is
            as quick.
        unknown: what is not known, in sentences.
    """

    trace: Trace
    culprits: Culprits
    link: Link
    predictions: Sequence[Prediction]
    own: Prediction | None
    choices: Sequence[Choice]
    unknown: Sequence[str]

    @property
    def bound(self) -> float:
        """Gain over Horovod where nobody waited for anybody, each rank at its own pace."""
        return float((1 / self.culprits.work).mean() / self.predictions[0].steps_per_s.mean)


def advise(
    trace: Trace,
    given: Given = Given(),  # noqa: B008  immutable
    modes: str = EVERY,
    steps: int = 200,
    resamples: int = 8,
    seed: int = 0,
) -> Advice:
    """Say what a trace says.

    Args:
        trace: of a run.
        given: what is known of the network.
        modes: names of those to try, with commas between them.
        steps, resamples, seed: see ``predict``.

    Raises:
        ValueError: there is no such mode, or fewer than two ranks.
    """
    if trace.ranks < 2:
        raise ValueError("the trace is of a single rank: nobody waits for anybody, record a job of several")
    link, tried = fit(trace, given), named_modes(trace.ranks, modes)
    recorded = mode_of(trace.headers[0])
    known = recorded is None or any(recorded.is_as(mode) for mode in (YARDSTICK, *tried))
    also = [] if recorded is None or known else [recorded]
    size = trace.headers[0].parameter_bytes
    found = predict(trace.work, link.network, size, [*tried, *also], steps, resamples, seed, trace.local_size)
    own = next((each for each in found if recorded is not None and each.mode.is_as(recorded)), None)
    others = sorted(found[1 : 1 + len(tried)], key=lambda each: -each.gain.mean)
    return Advice(
        trace=trace,
        culprits=find_culprits(trace.work, trace.waits),
        link=link,
        predictions=[found[0], *others],
        own=own,
        choices=choose(found[0], others),
        unknown=unknown(trace, link),
    )


def mode_of(header: Header) -> Mode | None:
    """Return the mode that a trace was recorded under; None if it cannot be simulated."""
    quorum, every = header.options.get("quorum"), header.options.get("average_every")
    arms = {algorithm: arm for arm, algorithm in GOSSIP.items()}
    if header.algorithm == HOROVOD:
        return YARDSTICK
    if header.options.get("local_size", 1) != 1 or header.options.get("hierarchical"):
        return None  # hosts are simulated as no hosts
    risk = Risk.OWN
    if quorum is not None:
        risk = Risk.NONE if waits_for_all(quorum, header.ranks) else Risk.LATE
        arm = f"k{quorum}" if isinstance(quorum, int) else str(quorum)
    elif header.algorithm in arms:
        arm = arms[header.algorithm] + (f"-avg{every}" if isinstance(every, int) and every else "")
    elif header.algorithm in LEADERS:
        arm = header.algorithm
    else:
        return None
    pace = {"pace": header.options["pace"]} if header.options.get("pace") == "rounds" else {}
    return Mode(arm, arm, "", risk, options=pace)


def choose(base: Prediction, others: Sequence[Prediction]) -> list[Choice]:
    """Return the best mode of each risk, from the least on, as long as it is ``WORTH`` more than those before.

    It must be so in every resample: the least of its gains counts.
    """
    found: list[Choice] = []
    before = 1.0
    for risk in Risk:
        best = max((each for each in others if each.mode.risk == risk), key=lambda each: each.gain.low, default=None)
        if best is None or best.gain.low < before * WORTH:
            continue
        waits = f"a rank waits {1e3 * best.wait_s:.3g} ms a step, under Horovod {1e3 * base.wait_s:.3g} ms"
        found.append(Choice(best, f"{best.gain.mean:.2f} times Horovod's steps a second: {waits}"))
        before = best.gain.mean
    return found


def unknown(trace: Trace, link: Link) -> list[str]:
    """Return what is not known, in sentences."""
    found = [
        "Accuracy: steps a second are not seconds to an accuracy. What modes cost there was measured in other trainings"
        " (docs/choosing.md); try two seeds of yours.",
        f"The spread is over resamples of these {trace.steps} steps. What is rarer, or begins later, is not in it.",
        "Other loads: ranks that share cores, disks or links with each other, or with other jobs, are quicker or slower"
        " under another mode, since they then compute at other times.",
        "Communication is simulated after the computation, in one piece: what Horovod or EagerOptimizer hides behind"
        " the backward pass is not known. A pause, such as an evaluation, counts as computation unless it was skipped.",
        "Input: batches that are made in the background (tf.data, a DataLoader's workers) while a rank waits for others"
        " count as work only where the rank waits for them too: with less waiting that time shows, and gains are"
        " smaller.",
        f"The network: {link.origin}.",
    ]
    if not all(header.synchronized for header in trace.headers):
        found.insert(0, "Times on the GPU: it was not synchronized, so they say little; record with --synchronize.")
    if not trace.synchronous and trace.headers[0].algorithm != HOROVOD and not trace.waits.any():
        found.insert(
            0, "Waiting: none was seen. If ranks wait inside the backward pass (DDP), it counts as their work."
        )
    if trace.clocks_ahead is None:
        found.append("The clocks of the hosts: nothing here depends on them, but a picture of the ranks side by side.")
    if np.ptp([header.parameter_bytes for header in trace.headers]):
        found.append("The size of the model: ranks do not agree on it; rank 0's was taken.")
    return found
