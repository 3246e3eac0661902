"""Blocks of Python in the pages, and what each needs before it can run. No framework here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^( *)```(python|diff)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TORCH = """
import os
import torch
import horovod.torch
import hvd_async
import hvd_async.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(hvd.rank()))
loader = [(x, (x.sum(1) > 0).long()) for x in samples.split(8)]
loss_fn, epochs, evaluate = torch.nn.CrossEntropyLoss(), 2, lambda model: model(samples)
"""
WRAPPED = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
STEP = """
for x, y in loader:
    opt.zero_grad()
    loss_fn(model(x), y).backward()
    opt.step()
opt.drain()
"""
KERAS = """
import os
import keras
import numpy as np
import tensorflow as tf
import hvd_async.tensorflow.keras as hvd
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, activation="softmax")])
input_shape = (None, 8)
x = np.random.RandomState(hvd.rank()).randn(32, 8).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 0).astype("int32"))).batch(16)
"""
ONE_HOT = "data = data.map(lambda x, y: (x, tf.one_hot(y, 2)))\n"
LOSS = ("loss=...", 'loss="sparse_categorical_crossentropy"')
SAM = """
class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base_optimizer, **options):
        super().__init__(parameters, options)
        self.base_optimizer = base_optimizer(self.param_groups, **options)
    @torch.no_grad()
    def first_step(self, zero_grad=False):
        self.before = [p.clone() for p in model.parameters()]
        torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=0.1)
        if zero_grad: self.zero_grad()
    @torch.no_grad()
    def second_step(self, zero_grad=False):
        torch._foreach_copy_(list(model.parameters()), self.before)
        self.base_optimizer.step()
        if zero_grad: self.zero_grad()
"""


@dataclass(frozen=True)
class Block:
    """What surrounds a block, and what stands for its "...".

    Attributes:
        framework: "torch" or "tensorflow".
        before, after: code that is run before and after it, in one namespace.
        instead: (text, what replaces it); each text has to be there.
    """

    framework: str
    before: str = ""
    after: str = ""
    instead: tuple[tuple[str, str], ...] = ()


SGD = "opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
OPTIMIZER = "optimizer = hvd.EagerOptimizer(opt, model.named_parameters())\n"
MONITORED = f"""
opt = hvd.GossipOptimizer(opt, model.named_parameters())
monitor = hvd_async.Monitor(opt, every=1)
{STEP.replace("opt.drain()", "")}
"""
SIGNALLED = """
import signal
opt, calls = optimizer, []
def loss_fn(output, labels):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGUSR1)
    return torch.nn.functional.cross_entropy(output, labels)
"""
COMPILED = f"""
model.compile(optimizer=hvd.EagerOptimizer(keras.optimizers.SGD(0.1)), {LOSS[1]}, jit_compile=False)
"""
FIT_ONCE = (
    COMPILED
    + """
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(data, epochs=1, callbacks=callbacks, verbose=0)
model.save("last.keras")
open("epoch", "w").write("1")
del model
"""
)
SAVE = """
before = opt.rounds
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "checkpoint.pt")
opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters())
"""
BLOCKS = {
    "README.md 1": Block("torch", TORCH, "assert opt.stats().steps == 4",
                         (('dist.init_process_group("gloo")', ""),)),  # (the ranks of this job are Horovod's)
    "README.md 2": Block("torch", TORCH + WRAPPED + SGD, STEP),
    "README.md 3": Block("tensorflow", KERAS, "assert int(opt.iterations) >= 2"),
    "docs/advisor.md 1": Block("torch", TORCH + WRAPPED + SGD + OPTIMIZER,
                               "recorder.close()\nassert os.path.exists(f'trace/rank.{hvd.rank()}.jsonl')",
                               (("...", "opt = optimizer\n" + STEP),)),
    "docs/advisor.md 2": Block("tensorflow", KERAS, "assert os.path.exists(f'trace/rank.{hvd.rank()}.jsonl')"),
    "docs/clusters.md 1": Block("torch", TORCH + WRAPPED + SGD + OPTIMIZER + SIGNALLED,
                                "assert opt.stats().steps == 2"),
    "docs/eager.md 1": Block("torch", TORCH, "assert opt.stats().steps == 4"),
    "docs/eager.md 2": Block("torch", TORCH + WRAPPED + SGD + OPTIMIZER + "opt = optimizer\n" + STEP,
                             "assert hvd.rank() or os.path.exists('checkpoint.pt')"),
    "docs/eager.md 3": Block("torch", TORCH + WRAPPED + SGD + OPTIMIZER + "opt = optimizer\n" + STEP + SAVE,
                             "assert opt.rounds == before, (opt.rounds, before)\n" + STEP),
    "docs/eager_options.md 1": Block("torch", "import itertools\n" + TORCH + WRAPPED + SGD, "assert opt.rounds >= 20",
                             (("1000", "20"),)),
    "docs/elastic.md 1": Block("torch", "", "assert state.batch == 1000"),
    "docs/gossip.md 1": Block("torch", TORCH + WRAPPED, "assert opt.stats().steps == 8"),
    "docs/gossip.md 2": Block("torch", TORCH + WRAPPED + SGD, STEP),
    "docs/gossip.md 3": Block("torch", TORCH + WRAPPED, STEP),
    "docs/keras.md 1": Block("tensorflow", KERAS, 'assert hvd.rank() or os.path.exists("last.keras")',
                             (("model = ...  # the first", "# the first"), LOSS)),
    "docs/keras.md 2": Block("tensorflow", KERAS, "assert optimizer.stats().steps == 60",
                             (LOSS, ("drain=True), ...]", "drain=True)]"), ("20: 2", "20: 1"))),  # at 2 ranks
    "docs/keras.md 3": Block("tensorflow", KERAS + FIT_ONCE, "assert start == 1\nassert model.optimizer.rounds >= 60"),
    "docs/keras_hosts.md 1": Block("tensorflow",
                                   KERAS + ONE_HOT + "opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))\n",
                                   "model.fit(data, verbose=0)"),
    "docs/keras_hosts.md 2": Block("tensorflow", KERAS + ONE_HOT + "build = lambda: model\n",
                                   "assert int(opt.iterations) >= 1"),
    "docs/leaders.md 1": Block("torch", TORCH + WRAPPED, "assert opt.stats().steps == 4"),
    "scripts/benchmarks/measurements.md 1": Block("torch"),
    "docs/migrating.md 1": Block("torch", TORCH, STEP),
    "docs/migrating.md 2": Block("torch", TORCH + WRAPPED + SAM, "assert opt.base_optimizer.stats().steps == 4"),
    "docs/monitoring.md 1": Block("torch", TORCH + WRAPPED + SGD + OPTIMIZER + "opt = optimizer\n",
                                  "opt.drain()\nassert hvd.rank() or os.path.exists('runs/x')",
                                  (("    ...", "    opt.zero_grad()\n    loss_fn(model(x), y).backward()"),)),
    "docs/monitoring.md 2": Block("tensorflow", KERAS + COMPILED, "assert hvd.rank() or os.path.exists('runs/x')",
                                  (("[...,", "[hvd.callbacks.BroadcastGlobalVariablesCallback(0),"),)),
    "docs/monitoring.md 3": Block("torch", TORCH + WRAPPED + SGD + MONITORED, "assert opt.stats().steps == 4"),
}  # fmt: skip
"""By page and number."""


def found() -> dict[str, str]:
    """The blocks of all pages; of a diff the code after the change. Those of recipes.md are parts of whole scripts, and
    from_ddp.md has one."""
    blocks = {}
    measured = ROOT / "scripts" / "benchmarks" / "measurements.md"
    for page in [ROOT / "README.md", measured, *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name in ("recipes.md", "from_ddp.md"):
            continue
        for number, match in enumerate(FENCE.finditer(page.read_text(encoding="utf-8")), 1):
            lines = match[3].splitlines()
            if match[2] == "diff":
                lines = [line[1:] for line in lines if not line.startswith("-")]
            blocks[f"{page.relative_to(ROOT)} {number}"] = "\n".join(lines)
    return blocks


def whole(name: str) -> str:
    """A block with what surrounds it."""
    block, code = BLOCKS[name], found()[name]
    for text, replacement in block.instead:
        assert text in code, f"{name} has no {text!r}"
        code = code.replace(text, replacement)
    return "\n".join((block.before, code, block.after))
