"""torch: mistakes of scripts that come from DDP, refused with the line to write, in either order of construction."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from hvd_async.torch import shared_models
from tests.conformance.torch_ranks import seeded

WRAPPERS: dict[str, Callable[..., Any]] = {
    "EagerOptimizer": lambda opt, **options: hvd.EagerOptimizer(opt, quorum="all", **options),
    "GossipOptimizer": lambda opt, **options: hvd.GossipOptimizer(opt, algorithm="dpsgd", **options),
    "LeaderOptimizer": lambda opt, **options: hvd.LeaderOptimizer(opt, algorithm="easgd", **options),
}


@pytest.fixture
def group() -> Iterator[None]:
    """A default process group of one rank, which DDP and FSDP need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # (a DDP that outlives its group may hold up the exit)
    dist.destroy_process_group()


def network() -> torch.nn.Module:
    return seeded(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(3, 4)).square().sum() * scale).backward()


def split(model: torch.nn.Module) -> torch.nn.Module:
    return parallelize_module(model, dist.init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


SHARED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DDP": (DistributedDataParallel, "DistributedDataParallel is around this model"),
    "replicate()": (replicate, "DistributedDataParallel is around this model"),
    "FSDP": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
        "FullyShardedDataParallel is around this model",
    ),
    "FSDP of flat parameters": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        r"FullyShardedDataParallel is around this model|the model was sharded by FSDP",
    ),
    "fully_shard()": (fully_shard, r"parameters are DTensors|the model was sharded by FSDP"),
    "parallelize_module()": (split, r"parameters are DTensors|the model was sharded by FSDP or tensor parallelism"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", SHARED)
def test_a_model_that_torch_shares_is_refused_when_wrapped_or_at_the_first_step(kind, wrapper, order, group):
    (share, message), wrap = SHARED[kind], WRAPPERS[wrapper]

    def train(rank: int) -> None:
        model = network()
        if order == "before" and kind != "replicate()":  # (it puts DDP there in the first forward pass)
            shared = share(model)
            with pytest.raises(ValueError, match=f"(?s)({message}).*{wrapper}"):
                wrap(sgd(shared))
            return
        shared = share(model) if order == "before" else None
        opt = wrap(sgd(model))
        shared = shared or share(model)
        backward(shared)
        before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
        for _ in range(2):
            with pytest.raises(ReplicaStateError, match=message):
                opt.step()
        assert all(map(torch.equal, before, opt.param_groups[0]["params"]))

    Cluster(1).run(train)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ddp_of_a_later_step_is_refused_there_and_forgotten_with_it(wrapper, group):
    def train(rank: int) -> None:
        model = network()
        opt = WRAPPERS[wrapper](sgd(model))
        other = DistributedDataParallel(network())  # (of another model)
        backward(model)
        opt.step()
        opt.zero_grad()
        shared = DistributedDataParallel(model)
        with pytest.raises(ReplicaStateError, match="DistributedDataParallel is around this model"):
            opt.step()
        del shared
        backward(model)
        opt.step()
        opt.drain()
        backward(other)

    Cluster(1).run(train)


def test_parameters_without_a_gradient_are_not_taken_for_sharded_ones(group):
    """Another model is sharded, and this one's first step has no gradient."""

    def train(rank: int) -> None:
        sharded, model = fully_shard(network()), network()
        opt = hvd.EagerOptimizer(sgd(model), quorum="all")
        opt.step()
        opt.drain()
        backward(sharded)

    Cluster(1).run(train)


EARLIER = """
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
from hvd_async.torch import shared_models
from tests.conformance.torch_ranks import seeded
print(shared_models.cause(list(model.module.parameters()), "EagerOptimizer"))
"""


def test_ddp_of_before_the_import_is_found():
    run = subprocess.run([sys.executable, "-c", EARLIER], capture_output=True, text=True, timeout=300, check=True)
    assert "DistributedDataParallel is around this model" in run.stdout


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        lambda model: PostLocalSGDOptimizer(sgd(model), None),
    ],
    ids=["ZeRO", "post-local SGD"],
)
def test_an_optimizer_that_communicates_is_refused(make, wrapper, group):
    with pytest.raises(ValueError, match=rf"wrap the optimizer.*{wrapper}\(torch.optim.AdamW"):
        WRAPPERS[wrapper](make(network()))


def train_plainly(model: Any, *opts: Any, steps: int = 2) -> None:
    for _ in range(steps):
        model.zero_grad()
        backward(model)
        for opt in opts:
            opt.step()


MISTAKES = list[Any]()
"""Calls of a script with a model and a wrapper, the wrapper's name, the error and its text. (Gradients changed after
``backward()``: ``test_torch_lost_changes``; further backward passes: ``test_torch_two_passes``; scalers:
``test_torch_precision``.)"""
WEIGHTS = ("GossipOptimizer", "LeaderOptimizer")


def mistake(error: type[Exception], message: str, wrappers: Iterable[str] = WRAPPERS) -> Any:
    """Add what a script does to the table."""

    def add(does: Callable[[Any, Any], object]) -> None:
        MISTAKES.extend(pytest.param(does, each, error, message, id=f"{does.__name__}-{each}") for each in wrappers)

    return add


def change(error: type[Exception], message: str) -> Any:
    """Add training in whose middle a script changes the model, its optimizer, or the one that this was made of."""

    def add(changes: Callable[[Any, Any, Any], object]) -> None:
        @mistake(error, message)
        @functools.wraps(changes)
        def train(model: Any, wrap: Any) -> None:
            plain = sgd(model)
            opt = wrap(plain)
            train_plainly(model, opt)
            changes(model, opt, plain)
            train_plainly(model, opt, steps=10)

    return add


CHANGED = "are not those with which the ranks met"
APART = r"SGD\.step\(\) of an optimizer that is not wrapped .* train apart\. Call step\(\) of what EagerOptimizer\(\)"


@change(ReplicaStateError, CHANGED)
def parameters_replaced(model: Any, opt: Any, plain: Any) -> None:
    opt.param_groups[0]["params"] = list(network().parameters())


@mistake(ReplicaStateError, CHANGED)
def parameters_replaced_before_a_drain(model: Any, wrap: Any) -> None:
    opt = wrap(sgd(model))
    train_plainly(model, opt)
    opt.param_groups[0]["params"] = list(network().parameters())
    opt.drain()


@change(ReplicaStateError, CHANGED)
def group_added_to_what_was_wrapped(model: Any, opt: Any, plain: Any) -> None:
    plain.add_param_group({"params": list(network().parameters())})


@change(ReplicaStateError, CHANGED)
def parameter_appended(model: Any, opt: Any, plain: Any) -> None:
    opt.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1)))


@change(UserWarning, r"other parameters by now instead of this optimizer's \(parameter 2, parameter 3\)")
def layer_replaced(model: Any, opt: Any, plain: Any) -> None:
    model[2] = torch.nn.Linear(4, 2)


@change(UserWarning, "other parameters by now")
def model_loaded_with_assign(model: Any, opt: Any, plain: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


@change(UserWarning, APART)
def new_optimizer(model: Any, opt: Any, plain: Any) -> None:
    opt.drain()
    train_plainly(model, sgd(model))


@mistake(UserWarning, APART)
def result_left(model: Any, wrap: Any) -> None:
    opt = sgd(model)
    wrap(opt)
    train_plainly(model, opt)


@mistake(UserWarning, APART)
def optimizer_of_a_part(model: Any, wrap: Any) -> None:
    opt = wrap(sgd(model[0]), named_parameters=model.named_parameters())
    train_plainly(model, opt, sgd(model[2]))


@mistake(UserWarning, r"SGD has stepped 10 times and is not wrapped: .* ranks train apart", ["EagerOptimizer"])
def no_wrapper(model: Any, wrap: Any) -> None:
    train_plainly(model, *[sgd(model)] * 5)


@mistake(UserWarning, "no parameter of this optimizer has had a gradient")
def model_made_again(model: Any, wrap: Any) -> None:
    train_plainly(network(), wrap(sgd(model)), steps=10)


@mistake(TypeError, r"clip gradients before step\(\)", WEIGHTS)
def clipping_in_rounds(model: Any, wrap: Any) -> None:
    wrap(sgd(model), round_transform=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0))


@mistake(TypeError, "as with a plain optimizer", WEIGHTS)
def scaler_passed(model: Any, wrap: Any) -> None:
    wrap(sgd(model), scaler=torch.amp.GradScaler("cpu"))


@mistake(ValueError, r"pass model\.named_parameters\(\)")
def model_as_names(model: Any, wrap: Any) -> None:
    wrap(sgd(model), named_parameters=model[0])


@mistake(ReplicaMismatchError, "different parameters")
def parameters_replaced_on_a_rank(model: Any, wrap: Any) -> None:
    opt = wrap(sgd(model))
    if model.rank == 1:
        opt.param_groups[0]["params"] = list(model[0].parameters())
    train_plainly(model, opt)


@mistake(ReplicaMismatchError, r"weights differ before .* '0\.weight.*\(model\.state_dict\(\), root.*first half of SAM")
def frozen_part_of_its_own(model: Any, wrap: Any) -> None:
    model[0].requires_grad_(False)
    model[0].without_memory = torch.nn.Parameter(torch.empty(1, device="meta"), False)
    model[0].without_shape = torch.nn.UninitializedParameter(False)
    with torch.no_grad():
        model[0].weight += model.rank
    train_plainly(model, wrap(sgd(model[2]), named_parameters=model.named_parameters()))


@mistake(ReplicaMismatchError, r"state differs.*has 'optimizer state: (7 rounds|loaded)'")
def rounds_on_one_rank(model: Any, wrap: Any) -> None:
    opt = wrap(sgd(model))
    if model.rank == 0:
        state = opt.state_dict()
        state["hvd_async"]["rounds"] = 7
        opt.load_state_dict(state)
    train_plainly(model, opt)


@mistake(ReplicaMismatchError, r"state differs.*hvd\.broadcast_optimizer_state\(")
def resuming_on_one_rank(model: Any, wrap: Any) -> None:
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if model.rank == 0:
        one = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        train_plainly(model, one, steps=1)
        opt.load_state_dict(one.state_dict())
    train_plainly(model, opt)


TO_ERRORS = pytest.mark.filterwarnings(
    "error:.*ranks train apart", "error:.*has had a gradient", "error:.*other parameters by now"
)


@TO_ERRORS
@pytest.mark.parametrize(("does", "wrapper", "error", "message"), MISTAKES)
def test_a_mistake_is_an_error_with_the_line_to_write(does, wrapper, error, message):
    def train(rank: int) -> None:
        model = network()
        model.rank = rank
        with pytest.raises(error, match=message):
            does(model, WRAPPERS[wrapper])

    Cluster(2).run(train)


class Around(torch.optim.Optimizer):
    """An optimizer whose step has one of its base optimizer inside, such as SAM's."""

    def __init__(self, model: torch.nn.Module, base: torch.optim.Optimizer) -> None:
        super().__init__(model.parameters(), {})
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


@TO_ERRORS
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_optimizers_that_may_step_the_parameters_of_a_wrapped_one_have_no_warning(wrapper):
    def train(rank: int) -> None:
        model = network()
        opt = WRAPPERS[wrapper](sgd(model))
        train_plainly(model, Around(model, opt))
        opt.drain()
        opt.discard()
        train_plainly(model, sgd(model))  # (alone)

    Cluster(2).run(train)


def test_modules_are_found_by_their_class_and_let_go():
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    class DistributedDataParallel(Named):  # (another package's)
        pass

    made = shared_models.found.made
    Named()
    assert shared_models.found.made == made
    one = DistributedDataParallel()
    assert shared_models.found.made == made + 1
    assert one in shared_models.found.modules.values()
    del one
    gc.collect()
    assert not [each for each in shared_models.found.modules.values() if isinstance(each, DistributedDataParallel)]


def test_parameters_that_are_not_trained_can_be_swapped_as_conversions_do():
    """torch refuses it for tensors with weak references."""
    one, other = torch.nn.Linear(1, 2), torch.nn.Linear(3, 2)
    torch.utils.swap_tensors(one.weight, other.weight)
    assert one.weight.numel() == 6


def test_optimizers_can_be_wrapped_while_other_threads_make_models():
    def train(rank: int) -> None:
        for _ in range(200):
            hvd.EagerOptimizer(sgd(network()), quorum="all")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        Cluster(3).run(train)
    finally:
        sys.setswitchinterval(interval)
