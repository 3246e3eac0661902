"""Advice as tables and sentences, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvd_async.advisor.advice import Advice
from hvd_async.advisor.prediction import YARDSTICK, Prediction, Risk, Spread

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, names of columns, and rows."""


def advice_as_json(advice: Advice) -> dict[str, Any]:
    """Return advice as JSON values; times in s."""
    found, header = advice.culprits, advice.trace.headers[0]
    return {
        "trace": {
            "ranks": advice.trace.ranks,
            "steps": advice.trace.steps,
            "algorithm": header.algorithm,
            "compared_with": advice.base,
            "options": header.options,
            "parameter_bytes": header.parameter_bytes,
            "steps_per_s": advice.trace.steps_per_s,
            "predicted_steps_per_s": advice.own.steps_per_s._asdict() if advice.own else None,
        },
        "culprits": {
            "slow_rank": found.slow,
            "lost": found.lost,
            "blame": found.blame.tolist(),
            "work_s": found.work.tolist(),
            "waited_s": found.waited.tolist(),
            "slowest_share": found.last.tolist(),
            "held_s": found.held.tolist(),
            "text": found.text(),
        },
        "network": {**advice.link.network._asdict(), "allreduce_s": advice.link.allreduce_s},
        "bound": advice.bound,
        "modes": modes_as_json(advice.predictions),
        "choices": [
            {"mode": each.prediction.mode.name, "line": each.prediction.mode.line, "reason": each.reason}
            for each in advice.choices
        ],
        "unknown": list(advice.unknown),
    }


def modes_as_json(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return predictions as JSON values; times in s."""
    return [
        {
            "mode": each.mode.name,
            "line": each.mode.line,
            "risk": each.mode.risk.name.lower(),
            "remark": each.mode.remark,
            "steps_per_s": each.steps_per_s._asdict(),
            "gain": each.gain._asdict(),
            "staleness": each.staleness,
            "staleness_most": each.staleness_most,
            "megabytes": each.megabytes,
            "wait_s": each.wait_s,
        }
        for each in predictions
    ]


def who(advice: Advice) -> Table:
    """Return the table of ranks."""
    found = advice.culprits
    rows = [
        [
            str(rank),
            f"{found.work[rank]:.4g}",
            f"{found.waited[rank]:.4g}",
            f"{found.last[rank]:.0%}",
            f"{found.blame[rank]:.0%}",
            _held(found.held[rank].tolist()),
        ]
        for rank in range(advice.trace.ranks)
    ]
    return (
        "Stragglers",
        ["rank", "work s", "waited s", "slowest in", "of all waiting", "delays most"],
        rows,
    )


def _held(seconds: Sequence[float]) -> str:
    most = max(range(len(seconds)), key=lambda rank: seconds[rank])
    return f"rank {most}, {seconds[most]:.3g} s a step" if seconds[most] > 0 else "none"


def what(predictions: Sequence[Prediction], base: str = "Horovod") -> Table:
    """Return the table of modes.

    Args:
        predictions: of the yardstick first.
        base: the yardstick's name.
    """
    rows = [
        [
            each.mode.name if place else base.lower(),
            _range(each.steps_per_s, ".3g"),
            _range(each.gain, ".2f"),
            f"{each.staleness:.2f} / {each.staleness_most}",
            f"{each.megabytes:.3g}",
            f"{1e3 * each.wait_s:.3g}",
            each.mode.risk.text.partition(":")[0],
        ]
        for place, each in enumerate(predictions)
    ]
    columns = ["mode", "steps/s", f"over {base}", "staleness mean / max", "MB a step", "wait ms", "risk"]
    return "What each mode would bring, simulated", columns, rows


def _range(spread: Spread, style: str) -> str:
    return f"{spread.mean:{style}} ({spread.low:{style}}-{spread.high:{style}})"


def sentences(advice: Advice) -> Iterator[str]:
    """Yield the paragraphs below the tables."""
    yield advice.culprits.text()
    if advice.own is not None:
        name = advice.base.lower() if advice.own.mode is YARDSTICK else advice.own.mode.name
        seen, predicted = advice.trace.steps_per_s, advice.own.steps_per_s.mean
        yield (
            f"The simulation of the job as it was recorded ({name}): {predicted:.3g} steps/s, recorded were "
            f"{seen:.3g}, so it is off by {predicted / seen - 1:+.0%}. Expect other modes to be off by as much or more."
        )
    yield f"If no rank waited: {advice.bound:.2f} times {advice.base}'s steps a second."
    if not advice.choices:
        risk = Risk.NONE if advice.own is None else advice.own.mode.risk
        head = "Stay as you are" if risk is Risk.NONE else 'Horovod\'s optimizer, or quorum="all", would do'
        yield f"{head}: no mode here is 10% faster than {advice.base} in every resample."
    for number, choice in enumerate(advice.choices):
        mode = choice.prediction.mode
        head = "Take" if not number else "Or, at a higher risk,"
        if advice.own is not None and advice.own.mode.is_as(mode):
            head = "You run it already:"
        remark = f" ({mode.remark})" if mode.remark else ""
        line = f"The line: opt = {mode.line}, with your other arguments."
        yield f"{head} {mode.name}: {choice.reason}. Risk: {mode.risk.text}{remark}. {line}"
    yield "Not known:\n" + "\n".join(f"- {each}" for each in advice.unknown)
