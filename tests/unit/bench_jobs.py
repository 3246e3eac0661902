"""What the benchmarks' jobs bring home, without a job: made-up figures of every rank for the blocks of a plan.

Numbers are round, so that a table can be checked in the head. A run that is not ``well`` misses what can be missed.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from hvd_async.traces.recorder import Recorder
from scripts.bench import parser
from scripts.benchmarks.support.arms import MUTANT, PLAIN
from scripts.benchmarks.support.names import LEADERS, gossip_of, read_name, waits_for_none
from scripts.benchmarks.support.nemesis import HOROVOD, Schedule, Trouble
from tests.unit.nemesis_history import history_of

Block = dict[str, Any]
Own = dict[str, Any]
OPTIONS = {
    "straggler": "--ranks 4 --arms horovod,majority,solo,auto --delay 0.1 0.2 --compute 0.1 --steps 10 --repetitions 2",
    "no_stragglers": "--arms horovod,all,solo --image-size 32 --repetitions 9",
    "activation": "--ranks 2 --rounds 10 --repetitions 2",
    "split_classes": f"--arms horovod,solo,sgp,lsgd,{MUTANT} --folds 2 --repetitions 2 --epochs 1",
    "sequence_lengths": "--arms horovod,majority,solo,auto --steps 14",
    "hetero": "--ranks 4 --arms horovod,adpsgd,lsgd --slow 5 --compute 1 --window 10 --repetitions 2 --even",
    "network": "--arms horovod,ddp,decent-dp,sgp,dpsgd,easgd --mbit 50 1000 --steps 3 --compute 0.5 --repetitions 2",
    "time_to_accuracy": "--kinds slow-rank network --arms horovod,ddp,solo,osgp-bf16 --length 0.2 --repetitions 2",
    "soak": "--arms solo,adpsgd,sgp --rounds 1000",
    "elastic": "--arms horovod,solo,dpsgd --weights 3072 5000 --repetitions 2",
    "nemesis": "--first 10 --schedules 10",
    "advice": "--arms all,adpsgd --jobs slow --steps 40 --repetitions 2",
    "gpu": "--arms plain,horovod,all,solo,sgp,lsgd --repetitions 9",
}
"""Of each case but ``scale``, which starts no job, a run in which all its figures, goals and remarks are there."""
VARIANTS = {
    "no_stragglers keras": "--framework tensorflow --repetitions 9",
    "sequence_lengths alone": "--arms horovod,solo --steps 14 --ms 0 --no-bucketed",
    "network compressed": "--arms horovod-fp16,dpsgd-fp16,dpsgd-int8 --mbit 50 --steps 3 --compute 0.5",
    "network hosts": "--arms horovod,solo-hosts,sgp-hosts --per-host 2 --mbit 50 --steps 3",
    "advice links": "--arms all --jobs even --steps 30 --mbit 50 --megabytes 1",
    "elastic keras": "--arms solo --framework tensorflow --weights 3072 --repetitions 1",
    "gpu ranks": "--ranks 2 --arms horovod,all --batch-size 64 --repetitions 9",
}
"""Other runs, which have other figures, goals or jobs: the name's first word is the case."""


def options(case: Any, *line: str, **more: Any) -> argparse.Namespace:
    """Return a case's options by a command line."""
    return argparse.Namespace(**vars(parser().parse_args([case.name, *line])) | more)


def timed(block: Block, rank: int, size: int, well: bool) -> Own:
    """A block of the timed jobs: rivals take 0.2 s a step beyond the computation, ours nothing, or 1 s."""
    arm = "solo" if block["arm"] == MUTANT else block["arm"]
    base = read_name(arm).base
    rival = base in ("horovod", "ddp", "decent-dp", PLAIN)
    extra = (0.0 if rival else 0.001) if block.get("keep") else 0.01 if rival else 0.0
    seconds = 0.05 + extra + (0.0 if well or rival else 0.3 * (1 + block["repetition"]))
    times = block.get("times") or [[0.0] * size]
    alone = waits_for_none(arm) or base in ("solo", "auto")
    steps, window, ends = block.get("steps"), block.get("window"), list[float]()
    steps = steps[rank] if isinstance(steps, list) else steps
    while steps is None or len(ends) < steps:
        row = times[len(ends) % len(times)]
        ends.append((ends[-1] if ends else 0.0) + seconds + (row[rank] if alone else max(row)))
        if window is not None and ends[-1] >= window:
            break
    count = len(ends)
    score = 0.97 - (0.0 if rival else 0.001 * block["seed"] if well else 0.04) - 0.2 * (block["arm"] == MUTANT)
    stats: Own = {"staleness": {"0": 3 * count // 4, "1": count - 3 * count // 4}, "contributors": {"2": count}}
    stats |= {"steps": count, "averagings": count // (1 if well else 2), "pulls": count // 2, "rounds": count}
    own: Own = {"ends": ends, "stats": {} if rival else stats, "rounds_before": 3, "identical": True}
    own |= {"waited": 0.1 * count, "sent": 8e6 * count, "cpu": 0.02 * count}
    own |= {"engine_s": (0.001 if well else 0.1) * count, "latency_s": None if rival else 0.1}
    own |= {"computed": [row[rank] + 0.001 * (rank + 1) for row in times][:count], "norm": 50.0}
    own |= {"distance": 0.5 if gossip_of(arm) else None, "of_mean": 0.95 if arm in LEADERS else None}
    own["accuracy"] = None if rank else score
    looks = block.get("looks", 1)
    own["curve"] = [[ends[-1] * look / looks, score * look / looks] for look in range(1, looks + 1)]
    if "trace" in block:
        recorded(block, rank, size)
    return own


def recorded(block: Block, rank: int, size: int) -> None:
    """Write a trace in which all wait for the slowest."""
    clock = [0.0]
    how: dict[str, Any] = {"algorithm": "eager", "options": {"quorum": "all"}, "clock": lambda: clock[0]}
    recorder = Recorder(block["trace"], rank, size, **how)
    for step in block["times"]:
        for mark, seconds in (("arrived", step[rank]), ("released", max(step) - step[rank] + 0.002), ("done", 0.0)):
            clock[0] += seconds
            getattr(recorder, mark)()
    recorder.close()


def activation(block: Block, rank: int, size: int, well: bool) -> Own:
    """Rounds by messages alone."""
    late, rounds = 0.001 * (1.0 if well else 10.0) * (0.5 * rank + block["busy"]), range(block["rounds"])
    return {"first": [float(i) for i in rounds], "received": [i + late * (1 + i / 100) for i in rounds]}


def soak(plan: Block, size: int, well: bool) -> Block:
    """One long job."""
    lost = 0 if well else 1
    notes = [{"round": 10.0 * i, "mb": 300.0 + (min(i, 10) if well else i), "s": 1.0} for i in range(101)]
    own, late = {"elapsed": 10.0, "identical": well, "memory": notes}, {"staleness": {"0": 3, "2": 1}}
    block: Block = {"arm": plan["arm"]}
    if gossip_of(plan["arm"]):
        stats: Own = {"steps": 900, "averagings": 250, "messages_sent": 250, "messages_left": 1, **late}
        block |= {"done": plan["rounds"] - lost, "graphs_used": 3, "weights_off": [0.0, 1e-15, lost / 10]}
        ranks = [stats | {"messages_taken": 249 - lost * (rank == 0)} for rank in range(size)]
    else:
        stats = {"rounds": 1000, "gradients_produced": 1000, **late}
        ranks = [stats | {"gradients_applied": 4000 - lost * (rank == 0)} for rank in range(size)]
    return block | {"by_rank": [own | {"stats": stats} for stats in ranks]}


def nemesis(schedule: Schedule, weights: int, well: bool) -> Block:
    """A schedule with a death; or one in which that is known late, and a step is taken again."""
    troubles = schedule.troubles or (Trouble(0, "kill", "step", 3, 0, 0.0),)
    history = history_of(msgspec.structs.replace(schedule, troubles=troubles), weights)
    for records in history.values() if not well and schedule.kind != HOROVOD else ():
        late = 0.5 if any(record["what"] == "meeting" for record in records) else 0.0
        records.sort(key=lambda record: record["at"])
        for record in records:
            record["at"] += late * (record["what"] in ("meeting", "generation") and record["at"] > 1)
        ended = [record for record in records if record["what"] == "stepped"]
        ended[-1]["batch"] = ended[-2]["batch"]
    return {"schedule": schedule.content(), "history": history}


ROWS = {"timed": timed, "timed_keras": timed, "activation": activation}
"""By job: what a rank finds in a block."""


def blocks_of(job: str, size: int, plan: Block, well: bool) -> list[Block]:
    """Return the blocks that a job writes, as they are read."""
    if job == "nemesis":
        found = [nemesis(msgspec.convert(schedule, Schedule), plan["weights"], well) for schedule in plan["schedules"]]
    elif job == "soak":
        found = [soak(plan, size, well)]
    else:
        found = []
        for block in plan["blocks"]:
            setting = {key: value for key, value in block.items() if key != "times"}
            waits = {"cudaDeviceSynchronize": 0.0 if well else 1.0, "cudaStreamSynchronize": 2.0}
            ranks = [waits if block.get("profile") else ROWS[job](block, rank, size, well) for rank in range(size)]
            found.append({**setting, "by_rank": ranks})
    read: list[Block] = json.loads(json.dumps(found))
    return read
