"""Elastic training with trouble in it: each process does what its schedules say, and writes down what it sees.

Every host is this machine, by another name of 127.0.0.1: Horovod lets no host in again on which a process has died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from scripts.virtual_cluster import CLUSTER, SSH_GIVES_UP

from ..support.data import FOLDER
from ..support.nemesis import (
    COLUMNS,
    CUTS,
    EAGER,
    FAST,
    HOROVOD,
    IN_A_RESET,
    LEADERS,
    LOSSES,
    SLOTS,
    SOMETIMES,
    Schedule,
    Trouble,
    points_of,
)
from .rank import counted

LIMIT = 120.0
"""Seconds after which a process that is still in the same schedule prints where it is, and ends."""
NOTICED = 2.5
"""Seconds after which Horovod has noticed hosts that have come or gone."""
WAITING = 0.2
"""Seconds of a batch in which ranks only wait for hosts."""
AGREE = 5
"""Batches between two agreements on whether the schedule has ended."""


# -- hosts -------------------------------------------------------------------------------------------------------------


class Hosts:
    """The hosts that Horovod finds: lines of a file, with as many ranks each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "hosts"
        self._spare = self._file.with_name("hosts.spare").read_text().split()
        self.per_host = int(self._spare[0].partition(":")[2])

    def change(self, gone: str | None = None, more: int = 0) -> None:
        """Take a host away, or add new ones."""
        if gone is None and more < 1:
            return
        lines = [line for line in self._file.read_text().split() if line.partition(":")[0] != gone]
        lines += [self._spare[claim(self._folder, "host")] for _ in range(more)]  # (none that a process has had)
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        unfinished.write_text("".join(f"{line}\n" for line in lines))
        unfinished.replace(self._file)

    def alive(self) -> list[str]:
        """Return those on which no process has died."""
        names = [line.partition(":")[0] for line in self._file.read_text().split()]
        return [name for name in names if not (self._folder / f"dead.{name}").exists()]


def claim(folder: Path, name: str) -> int:
    """Return the first number that no process has had by this name."""
    number = 0
    while True:
        with contextlib.suppress(FileExistsError), (folder / f"{name}.{number}").open("x"):
            return number
        number += 1


def on_a_virtual_host() -> bool:
    """Whether this process is on one."""
    return CLUSTER in os.environ


def cut_link(seconds: float | None = None) -> None:
    """Cut this process's virtual host off: what it sends, and is sent, is lost.

    Args:
        seconds: until its link is restored; None: it never is.
    """
    link = f"nsenter --net=/proc/{os.environ[CLUSTER]}/ns/net ip link set {socket.gethostname()}"
    subprocess.run(f"{link} down", shell=True, check=True)
    if seconds is not None:
        subprocess.Popen(f"sleep {seconds}; {link} up", shell=True, start_new_session=True)


def die() -> None:
    """Die at once, as by the kernel when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


# -- models ------------------------------------------------------------------------------------------------------------

At = Callable[[str], None]
"""Called with the point that is reached."""


def wrapped(hvd: Any, plain: Any, kind: str) -> Any:
    """Return the optimizer of a kind."""
    if kind in EAGER:
        return hvd.EagerOptimizer(plain, quorum=kind)
    if kind in LEADERS:
        return hvd.LeaderOptimizer(plain, algorithm=kind)
    return hvd.GossipOptimizer(plain, algorithm=kind)


class _Model:
    """Base of both.

    Attributes:
        hvd: the binding's module.
        optimizer: the wrapped one.
        ours: whether it is one of hvd_async.
        horovod: Horovod's module, and what ``horovods`` of it a reset calls.
    """

    hvd: Any
    horovod: Any
    horovods: dict[str, Callable[..., Any]]
    optimizer: Any
    ours = True
    _at: At

    def drain(self) -> None:
        if self.ours:
            self.optimizer.drain()

    def cut(self) -> None:
        if self.ours:
            self.optimizer.cut()

    def counts(self) -> dict[str, Any]:
        """Return the counts of an optimizer of hvd_async, and the staleness that it allows."""
        if not self.ours:
            return {}
        bound = self.optimizer._async.settings.get("max_staleness", 0)
        return {"stats": counted(self.optimizer.stats()), "max_staleness": bound}

    def _before_applying(self, at: At) -> None:
        """Have ``at("apply")`` called between the end of this step's waiting and what follows it."""
        if not self.ours:
            return
        self._at, driver = at, self.optimizer._async
        owner, name = (driver, "end_step") if hasattr(driver, "end_step") else (driver.worker, "begin")
        if owner is None or name in vars(owner):
            return
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._at("apply")
            return function(*arguments, **options)

        vars(owner)[name] = call


class TorchModel(_Model):
    """Weights that torch trains.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        import torch

        self.model = torch.nn.Linear(1, size, bias=False)
        torch.nn.init.zeros_(self.model.weight)

    @classmethod
    def begin(cls) -> Any:
        """Initialise; returns the binding's module."""
        import horovod.torch
        import torch

        import hvd_async.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        cls.hvd, cls.horovod = hvd, horovod.torch
        cls.horovods = {"shutdown": horovod.torch.shutdown, "init": horovod.torch.init}
        return hvd

    def state(self, kind: str, **attributes: Any) -> Any:
        """Return the elastic state, with a new optimizer."""
        import torch
        from horovod.torch.elastic import TorchState

        plain, self.ours = torch.optim.SGD(self.model.parameters(), lr=1.0), kind != HOROVOD
        if not self.ours:
            self.optimizer = self.hvd.DistributedOptimizer(plain, named_parameters=self.model.named_parameters())
            return TorchState(model=self.model, optimizer=self.optimizer, **attributes)
        self.optimizer = wrapped(self.hvd, plain, kind)
        return self.hvd.elastic.TorchState(model=self.model, optimizer=self.optimizer, **attributes)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)

    def weights(self) -> Any:
        """Return the weights, a copy."""
        return self.model.weight.detach().numpy().reshape(-1).copy()

    def step(self, index: int, at: At) -> None:
        """Take a step whose gradient is 1 at ``index``."""
        self.optimizer.zero_grad()
        loss = self.model.weight.reshape(-1)[index]
        hook = self.model.weight.register_hook(lambda _: at("backward"))
        loss.backward()
        hook.remove()
        at("before step")
        if hasattr(self.optimizer, "record_loss"):
            self.optimizer.record_loss(loss.detach())
        self._before_applying(at)
        at("step")
        self.optimizer.step()

    def agreed(self, value: bool) -> bool:
        """Return rank 0's value. A collective of the user's."""
        import torch

        return bool(self.hvd.broadcast(torch.tensor([float(value)]), 0, name="nemesis.agreed"))

    def save(self, file: Path) -> None:
        """Write a checkpoint, after ``cut()``."""
        import torch

        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)


class KerasModel(_Model):
    """Weights that a Keras optimizer trains, eagerly.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        import keras

        # (named: Keras numbers layers by how many a process has made, and a new one has made fewer)
        layer = keras.layers.Dense(size, use_bias=False, kernel_initializer="zeros", name="layer")
        self.model = keras.Sequential([keras.Input((1,)), layer], name="model")

    @classmethod
    def begin(cls) -> Any:
        import horovod.tensorflow
        import tensorflow as tf

        import hvd_async.tensorflow.keras as hvd

        tf.config.threading.set_intra_op_parallelism_threads(1)
        hvd.init()
        cls.hvd, cls.horovod = hvd, horovod.tensorflow
        cls.horovods = {"shutdown": horovod.tensorflow.shutdown, "init": horovod.tensorflow.init}
        return hvd

    def state(self, kind: str, **attributes: Any) -> Any:
        import keras

        self.optimizer = wrapped(self.hvd, keras.optimizers.SGD(1.0), kind)
        return self.hvd.elastic.KerasState(self.model, self.optimizer, **attributes)

    def set_rate(self, rate: float) -> None:
        self.optimizer.learning_rate = float(rate)

    def weights(self) -> Any:
        return self.model.trainable_variables[0].numpy().reshape(-1).copy()

    def step(self, index: int, at: At) -> None:
        import tensorflow as tf

        variable = self.model.trainable_variables[0]
        own = np.zeros(variable.shape, np.float32)
        own[0, index] = 1.0
        at("backward")
        at("before step")
        if hasattr(self.optimizer, "record_loss"):
            self.optimizer.record_loss(float(self.weights()[index]))
        self._before_applying(at)
        at("step")
        self.optimizer.apply([tf.constant(own)], self.model.trainable_variables)

    def agreed(self, value: bool) -> bool:
        import tensorflow as tf

        return bool(self.hvd.broadcast(tf.constant([float(value)]), 0, name="nemesis.agreed"))

    def save(self, file: Path) -> None:
        self.model.save_weights(file.with_name(f"{file.name}.weights.h5"))  # (the name has dots: a host is in it)


MODELS: dict[str, Any] = {"torch": TorchModel, "tensorflow": KerasModel}


# -- a rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """This process, in one schedule.

    Args:
        model: a new one.
        schedule: to go through.
        number: of the schedule, in the job.
        folder: the job's.
    """

    def __init__(self, model: Any, schedule: Schedule, number: int, folder: Path) -> None:
        self._model, self._schedule, self._number, self._folder = model, schedule, number, folder
        self._host = os.environ["HOROVOD_HOSTNAME"]
        self._hosts = Hosts(folder)
        self._slot = claim(folder, f"slot.{number}")
        self._name = self._host if self._hosts.per_host == 1 else f"{self._host} {self._slot}"
        self._records = (folder / f"history.{number}.{self._name}").open("a", buffering=1)
        self._pauses = random.Random(f"{schedule.seed} {self._name}")
        self._disk = 0.0
        self._process = psutil.Process()
        self.state = model.state(schedule.kind, batch=0)
        for point, name in (("meeting", "restore"), ("reset", "on_reset"), ("sync", "sync")):
            setattr(self.state, name, self._in_reset(point, getattr(self.state, name)))
        for name, function in model.horovods.items():
            setattr(model.horovod, name, self.timed(name, function))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is written down with how long it took."""

        def call(*arguments: Any, **options: Any) -> Any:
            started = time.time()
            try:
                return function(*arguments, **options)
            finally:
                self.write(name, seconds=time.time() - started)

        return call

    def write(self, what: str, **more: Any) -> None:
        """Write a record down. (It outlives the process: the kernel has it.)"""
        self._records.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")

    # -- trouble ----------------------------------------------------------------------------------------------

    def _in_reset(self, point: str, function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            self.write(point)
            self._trouble(point, 0 if not hasattr(self.state, "batch") else self.state.batch)
            function()

        return call

    def _trouble(self, point: str, batch: int) -> None:
        """Make the trouble that is due here, if it is this rank's."""
        hvd = self._model.hvd
        for trouble in self._schedule.troubles:
            done = self._folder / f"done.{self._number}.{trouble.number}"
            mine = trouble.point == point and batch >= trouble.batch and trouble.victim % hvd.size() == hvd.rank()
            if mine and not done.exists():
                with contextlib.suppress(FileExistsError), done.open("x"):
                    if hvd.size() > self._hosts.per_host or trouble.action == "join":  # (the last host is spared)
                        more = {"action": trouble.action, "point": point, "batch": batch, "serves": self._serves()}
                        self.write("trouble", **more)
                        self._make(trouble)

    def _make(self, trouble: Trouble) -> None:
        match trouble.action:
            case "kill":
                (self._folder / f"dead.{self._host}").touch()
                if on_a_virtual_host() and trouble.victim % 2:  # the host with it: its end is not announced
                    self._hosts.change(gone=self._host)
                    cut_link()
                if trouble.point in ("step", *SOMETIMES, *IN_A_RESET):
                    threading.Timer(trouble.seconds, die).start()
                else:
                    die()
            case "stop":
                subprocess.Popen(
                    ["sh", "-c", f"sleep {trouble.seconds}; kill -CONT {os.getpid()}"], start_new_session=True
                )
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                if on_a_virtual_host():
                    cut_link(self._cut_seconds(trouble))
                else:
                    cut_off()
            case "join":
                self._hosts.change(more=1)
            case "leave":
                self._hosts.change(gone=self._host)
            case "slow disk":
                self._disk = trouble.seconds

    def _cut_seconds(self, trouble: Trouble) -> float:
        """Return the seconds of a cut of a virtual host's link: a schedule takes away no more ranks than it may."""
        seconds = CUTS[trouble.victim % len(CUTS)]
        if seconds > SSH_GIVES_UP:
            taken = sum(one.action in ("kill", "leave") for one in self._schedule.troubles)
            with contextlib.suppress(FileExistsError), (self._folder / f"lost.{self._number}").open("x"):
                if taken < LOSSES:
                    (self._folder / f"dead.{self._host}").touch()  # Horovod lets the host in no more
                    return seconds
            return CUTS[0]
        return seconds

    @property
    def _quiet(self) -> bool:
        """Whether all trouble is over: not that which waits for a loss that never comes."""
        ever = [one for one in self._schedule.troubles if one.point not in IN_A_RESET]
        return all((self._folder / f"done.{self._number}.{one.number}").exists() for one in ever)

    def _since_trouble(self) -> float:
        """Seconds since the last trouble, of any rank."""
        done = [file.stat().st_mtime for file in self._folder.glob(f"done.{self._number}.*")]
        return time.time() - max(done, default=0.0)

    # -- training ---------------------------------------------------------------------------------------------

    def train(self, state: Any) -> None:
        """Train until all trouble is over and as many ranks are there as at the beginning."""
        model, hvd = self._model, self._model.hvd
        model.set_rate(hvd.size() if self._schedule.kind in EAGER else 1)
        held = {"threads": [one.id for one in self._process.threads()], "files": self._process.num_fds()}
        held["weights"] = self._weights()
        self.write("generation", size=hvd.size(), rank=hvd.rank(), batch=state.batch, **held)
        while True:
            batch = state.batch
            if batch == COLUMNS:
                raise RuntimeError("the hosts that were asked for have not come")
            self._trouble("between", batch)
            index = self._slot * COLUMNS + batch
            self.write("step", batch=batch)
            model.step(index, lambda point, batch=batch: self._trouble(point, batch))
            self.write("stepped", batch=batch, own=float(model.weights()[index]))
            state.batch += 1
            self._occasions(batch)
            if batch % AGREE == AGREE - 1 and model.agreed(batch >= FAST and self._settled()):
                break
            time.sleep(self._pauses.uniform(0.0, 0.01) if batch < FAST else WAITING)
        model.drain()

    def _serves(self) -> list[str]:
        """Return what this process's control processes are: a relay, or the coordinator."""
        commands = []
        for child in self._process.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # (it has just ended, or is a zombie)
                commands.append(child.cmdline())
        return [command[-2] for command in commands if any("hvd_async.runtime.relays" in word for word in command)]

    def _weights(self) -> list[float]:
        """Return the variables to check: not of a model that is large to be slow."""
        weights = self._model.weights()
        return list(map(float, weights)) if len(weights) == SLOTS * COLUMNS else []

    def _occasions(self, batch: int) -> None:
        """Do what only some batches have."""
        points = points_of(batch)
        if "drain" in points:
            self._trouble("drain", batch)
            self._model.drain()
        if "checkpoint" in points:
            self._trouble("checkpoint", batch)
            self._model.cut()
            saved = self._folder / f"saved.{self._name}"
            self._model.save(saved)
            time.sleep(self._disk)
            self._disk = 0.0
        if "commit" in points:
            if batch >= FAST:
                self._restore_size()
            self._trouble("commit", batch)
            self.state.commit()

    def _restore_size(self) -> None:
        """Have as many hosts as at the beginning, once all trouble is over (rank 0)."""
        if self._model.hvd.rank() == 0 and self._quiet and self._since_trouble() > NOTICED:
            alive, start = self._hosts.alive(), self._schedule.start // self._hosts.per_host
            if len(alive) < start:
                self._hosts.change(more=start - len(alive))
            elif len(alive) > start:
                self._hosts.change(gone=alive[-1])

    def _settled(self) -> bool:
        over = self._quiet and self._since_trouble() > NOTICED
        alive = len(self._hosts.alive()) * self._hosts.per_host
        return over and self._model.hvd.size() == self._schedule.start == alive

    def run(self) -> None:
        """Go through the schedule to its end."""
        self.write("begin", host=self._host, slot=self._slot, pid=os.getpid())
        self._model.hvd.elastic.run(self.train)(self.state)
        self.write("end", drained=True, weights=self._weights(), serves=self._serves(), **self._model.counts())
        self._records.close()
        if self._model.hvd.rank() == 0:
            self._tell()

    def _tell(self) -> None:
        """Give the schedule's history to the launcher, when all have ended."""
        deadline = time.monotonic() + LIMIT / 2
        while True:
            files = self._folder.glob(f"history.{self._number}.*")
            by_host = {file.name.split(".", 2)[2]: read(file) for file in files}
            if sum(records[-1]["what"] == "end" for records in by_host.values() if records) >= self._schedule.start:
                break
            if time.monotonic() > deadline:
                raise RuntimeError("the other ranks have not ended this schedule")
            time.sleep(0.02)
        block = {"schedule": self._schedule.content(), "history": by_host}
        with (self._folder / "blocks.jsonl").open("a") as blocks:
            blocks.write(json.dumps(block) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Return a history's records; the last line of a process that was killed may lack its end."""
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def cut_off() -> None:
    """End all of this process's connections, as when a link is cut and both ends notice it."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as end:
                end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Go through all schedules that are left when this process begins."""
    os.environ["HVD_ASYNC_MACHINE"] = os.environ["HOROVOD_HOSTNAME"]
    folder = Path(os.environ[FOLDER])
    plan = json.loads((folder / "plan.json").read_text())
    model_of, turn = MODELS[plan["framework"]], folder / "turn"
    meet = model_of.begin()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    first = int(turn.read_text()) if turn.exists() else 0
    for number in range(first, len(plan["schedules"])):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if meet.rank() == 0:
            (folder / "turn.new").write_text(str(number))
            (folder / "turn.new").replace(turn)  # (a new rank may read it just now)
            (folder / "unfinished").touch()
        Rank(model_of(plan["weights"]), msgspec.convert(plan["schedules"][number], Schedule), number, folder).run()
        gc.collect()
    faulthandler.cancel_dump_traceback_later()
    if meet.rank() == 0:
        (folder / "unfinished").unlink()
