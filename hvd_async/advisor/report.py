"""Advice as tables and sentences, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvd_async.advisor.advice import Advice, expected
from hvd_async.advisor.prediction import YARDSTICK, Mode, Prediction, Risk, Spread
from hvd_async.traces.format import DDP, HOROVOD

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
            "fixed": advice.fixed,
        },
        "network": {**advice.link.network._asdict(), "allreduce_s": advice.link.allreduce_s},
        "bound": advice.bound,
        "modes": modes_as_json(advice.predictions),
        "best": [each.mode.name for each in advice.best],
        "choices": [
            {"mode": each.prediction.mode.name, "line": each.prediction.mode.line, "reason": each.reason}
            for each in advice.choices
        ],
        "warnings": list(advice.warnings),
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


MOST_RANKS = 8
"""Number of ranks that a report shows, the ones that cause most waiting, unless everything is shown."""


def who(advice: Advice, everything: bool = True) -> Table:
    """Return the table of ranks; of many only the ones that cause most waiting, unless ``everything`` is set."""
    found, shown = advice.culprits, list(range(advice.trace.ranks))
    if not everything:
        shown = sorted(sorted(shown, key=lambda rank: -found.blame[rank])[:MOST_RANKS])
    rows = [
        [
            str(rank),
            f"{found.work[rank]:.4f}",
            f"{found.waited[rank]:.4f}",
            f"{found.last[rank]:.0%}",
            f"{found.blame[rank]:.0%}",
        ]
        for rank in shown
    ]
    title = "Ranks" if len(shown) == advice.trace.ranks else f"The {len(shown)} ranks that cause most waiting"
    columns = ["rank", "works, s/step", "waits, s/step", "is the last in, % of steps", "causes, % of all waiting"]
    return title, columns, rows


def brief(advice: Advice) -> Table:
    """Return the table of the best modes."""
    base, first = advice.base, advice.predictions[0]
    rows = [
        [
            each.mode.line or "",
            _range(each.gain, ".2f"),
            f"{1e3 * each.wait_s:.1f}",
            each.mode.risk.text.partition(":")[0],
        ]
        for each in advice.best
    ]
    waits = f"{1e3 * first.wait_s:.1f} ms/step"
    title = f"The fastest modes, simulated ({base} has 1.00: {first.steps_per_s.mean:.3g} steps/s, waits {waits})"
    return title, ["write", "relative speed", "waits, ms/step", "risk"], rows


def what(predictions: Sequence[Prediction], base: str = "synchronous SGD") -> Table:
    """Return the table of all modes.

    Args:
        predictions: of the yardstick first.
        base: the yardstick's name.
    """
    rows = [
        [
            each.mode.name if place else base,
            f"{each.steps_per_s.mean:.3g}",
            _range(each.gain, ".2f"),
            f"{1e3 * each.wait_s:.1f}",
            f"{each.megabytes:.3g}",
            f"{each.staleness:.2f}",
            str(each.staleness_most),
            each.mode.risk.text.partition(":")[0],
        ]
        for place, each in enumerate(predictions)
    ]
    late = ["mean steps late", "max steps late"]
    columns = ["mode", "steps/s", "relative speed", "waits, ms/step", "sends, MB/step", *late, "risk"]
    return f"All modes, simulated (relative to {base})", columns, rows


def _range(spread: Spread, style: str) -> str:
    mean, low, high = (f"{each:{style}}" for each in spread)
    return mean if low == high else f"{mean} ({low} to {high})"


def first_sentences(advice: Advice) -> Iterator[str]:
    """Yield what is obvious: the rank to fix, and what it costs."""
    found = advice.culprits
    if found.slow is None or found.balanced:
        yield found.text()
        if not found.balanced:
            rate = 1 / advice.predictions[0].steps_per_s.mean
            lost = 10 * (rate - found.work.mean()) / rate
            yield f"No rank is to blame alone. Of 10 hours under {advice.base} a rank waits {lost:.1f}."
        return
    yield found.text(advice.trace.hosts[found.slow])
    under = "" if advice.trace.synchronous else f", under {advice.base}"
    yield (
        f"Fix that first: the job would be {advice.fixed:.2f} times as fast{under}, without changing a line. "
        f"Of 10 hours, {10 * (1 - 1 / advice.fixed):.1f} are lost."
    )


def change(advice: Advice, mode: Mode) -> str:
    """Return the change of the script that selects a mode: from DDP the whole diff, else the optimizer's lines."""
    header, call = advice.trace.headers[0], f"hvd_async.{mode.line}"
    if header.framework != "torch":
        return f"  opt = {call}  # with your other arguments"
    named = call.replace("(opt,", "(opt, named_parameters=model.named_parameters(),")
    drain = "+opt.drain()  # on every rank: before evaluation and checkpoints, and at the end"
    loop = ["+    opt.record_loss(loss)"] if "record_loss" in mode.remark else []
    if "pace" in mode.options:
        loop = ["-for step in range(steps):", "+while opt.rounds < steps:"]
    if header.algorithm == HOROVOD:
        wrapped = ["-opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())", f"+opt = {named}"]
        return "\n".join([" import horovod.torch as hvd", "+import hvd_async", *wrapped, *loop, drain])
    if header.algorithm != DDP:
        return f"  opt = {named}  # with your other arguments"
    lines = [
        "+import hvd_async.torch as hvd",
        " dist.init_process_group(...)",
        "+hvd.init()  # uses the process group",
        "-model = DistributedDataParallel(model)",
        "+hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # DDP did that",
        " opt = ...",
        f"+opt = {named.replace('hvd_async.', 'hvd.')}",
        *loop,
        drain,
        "no_sync(), clipping, GradScaler: docs/from_ddp.md",
    ]
    return "\n".join(lines)


def sentences(advice: Advice, everything: bool = False) -> Iterator[str]:
    """Yield the paragraphs below the tables.

    Args:
        advice: on a trace.
        everything: include what is the same for every trace, and other choices.
    """
    base = advice.base
    if advice.own is not None:
        name = base if advice.own.mode is YARDSTICK else advice.own.mode.name
        seen, predicted = advice.trace.steps_per_s, advice.own.steps_per_s.mean
        yield (
            f"Check: the simulation of the recorded job ({name}) gives {predicted:.3g} steps/s, the recording has "
            f"{seen:.3g} ({predicted / seen - 1:+.0%}). Other modes are off by as much or more."
        )
    yield from advice.warnings
    if not advice.choices:
        risk = Risk.NONE if advice.own is None else advice.own.mode.risk
        head = "Stay as you are" if risk is Risk.NONE else f'{base}, or quorum="all", would do'
        yield f"{head}: no mode here is 10% faster than {base} in every resample."
    for number, choice in enumerate(advice.choices):
        mode = choice.prediction.mode
        head = "Try" if not number else "Or, at a higher risk,"
        if advice.own is not None and advice.own.mode.is_as(mode):
            head = "You run it already:"
        remark = f" ({mode.remark})" if mode.remark else ""
        yield f"{head} {mode.line}: {choice.reason}. Its risk: {mode.risk.text}{remark}."
        if not number:
            yield change(advice, mode)
            other = expected(advice)
            if other is not None and not other.is_as(mode):
                situation = "a rank that is always slow" if advice.culprits.slow is not None else "random stragglers"
                yield (
                    f"docs/choosing.md names another mode for {situation}, {other.line}. It compares seconds to an "
                    "accuracy in short trainings; this report compares steps per second of your job, and names a "
                    "riskier mode only if it is 10% faster. Try both."
                )
    if everything:
        yield f"If no rank waited: {advice.bound:.2f} times the steps per second of {base}."
        yield "Not known:\n" + "\n".join(f"- {each}" for each in advice.unknown)
    else:
        yield "Accuracy is not predicted. --all: every mode, and what this simulation does not know."
