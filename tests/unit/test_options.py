"""Options of the families: both bindings take them alike, and what cannot be is refused with a hint."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib
from typing import Any

import pytest

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.gossip.config import NOT_GIVEN, GossipOptions
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import PLACEHOLDER, documented, in_flags, options_of, read_by_epoch
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS
from hvd_async.optimizers.factories import check_passes, scales

LIBRARY = pathlib.Path(__file__).resolve().parents[2] / "hvd_async"
OF_A_BINDING = {"torch": {"scaler", "round_transform", "named_buffers"}, "tensorflow": {"round_transform", "model"}}
"""Keywords that are about a framework's own objects."""


def factory(binding: str, family: str) -> ast.FunctionDef:
    """A factory's source: so no framework is imported."""
    tree = ast.parse((LIBRARY / binding / "factories.py").read_text(encoding="utf-8"))
    named = f"{family.capitalize()}Optimizer"
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == named)


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("binding", OF_A_BINDING)
def test_both_bindings_take_the_familys_options_in_its_order_and_with_its_defaults(binding: str, family: str):
    arguments = factory(binding, family).args
    keywords = {arg.arg: default for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    own = {name: node for name, node in keywords.items() if name not in OF_A_BINDING[binding]}
    fields = dataclasses.fields(OPTIONS[family])
    assert list(own) == [field.name for field in fields]
    assert {name: ast.literal_eval(node) for name, node in own.items() if node} == {f.name: f.default for f in fields}


@pytest.mark.parametrize("family", OPTIONS)
@pytest.mark.parametrize("binding", OF_A_BINDING)
def test_every_argument_of_a_factory_is_documented(binding: str, family: str):
    source = factory(binding, family)

    def wrapper() -> None: ...

    wrapper.__doc__ = ast.get_docstring(source, clean=False)
    assert PLACEHOLDER.format(OPTIONS[family].__name__) in wrapper.__doc__
    assert [ast.unparse(one) for one in source.decorator_list] == [f"documented({OPTIONS[family].__name__})"]
    lines = documented(OPTIONS[family])(wrapper).__doc__.splitlines()
    entries = [line.strip().partition(": ")[0] for line in lines if line.startswith(" " * 8) and line[8] != " "]
    told = {name for entry in entries for name in entry.split(", ")}
    arguments = source.args
    together = {"num_groups", "groups", "gradient_predivide_factor"}  # (told with another)
    assert {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)} - told <= together
    assert max(map(len, lines)) <= 120


def test_plans_have_the_options_defaults():
    defaults = {name: one.default for name, one in inspect.signature(make_plan).parameters.items() if name != "size"}
    names = {"topology": "graph", "mixing": "weights"}
    expected = {names.get(name, name): value for name, value in NOT_GIVEN.items() if name != "hierarchical"}
    assert defaults == expected | {"algorithm": GossipOptions.algorithm, "local_size": 1}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_own_options_are_its_familys(name: str):
    known = {*options_of(OPTIONS[ALGORITHMS[name].family]), "compression"}
    assert set(ALGORITHMS[name].options) <= known


STALENESS = r"max_staleness must be a number of rounds, 0 \(synchronous\) or more, got "
GRACE = r"grace must be \"auto\" or a number of seconds, at least 0, got "
CAP = r"bucket_cap_mb must be a number of MiB above 0 \(usually 25\), got "
PACE = r"pace must be one of 'steps', 'rounds', got "
TOGETHER = 'take pace="steps", or a quorum that does not wait for all'


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        *(({"max_staleness": value}, STALENESS) for value in (-1, 1.0, "2", None, True)),
        *(({"grace": value}, GRACE) for value in (-0.1, float("inf"), float("nan"), "1", None, True)),
        *(({"bucket_cap_mb": value}, CAP) for value in (0, -1, "25", None, True, float("nan"))),
        *(({"pace": value}, PACE) for value in ("round", "", None, 1, True)),
        *(({"nonfinite": value}, "must be one of 'skip', 'raise'") for value in ("ignore", None, True)),
        ({"quorum": 9}, "quorum must be .*, a number of ranks from 1 to 4, or .*, got 9"),
        ({"buffers": "mean"}, "must be one of 'average', 'local', 'root'"),
        ({"pace": "rounds", "quorum": "all"}, TOGETHER),
        ({"pace": "rounds", "max_staleness": 0}, TOGETHER),
        ({"pace": "rounds", "quorum": 2, "max_staleness": 0}, TOGETHER),
    ],
)
def test_wrong_options_of_partial_allreduce(options: dict[str, Any], hint: str):
    with pytest.raises(ValueError, match=hint):
        EagerOptions(**options).check(4)


@pytest.mark.parametrize(
    "options",
    [
        {"grace": 0},
        {"quorum": "all", "grace": 0.5},
        {"quorum": 0.5, "max_staleness": 1, "grace": 3},
        {"quorum": 4, "max_staleness": 0, "pace": "steps", "buffers": "local"},
        {"quorum": "auto", "pace": "rounds", "bucket_cap_mb": 0.5},
    ],
)
def test_right_options_of_partial_allreduce(options: dict[str, Any]):
    EagerOptions(**options).check(4)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"algorithm": "dsgd"}, "must be one of 'lsgd', 'easgd'"),
        ({"algorithm": "easgd", "local_pull": 0.5, "group": 2}, "local_pull, group: easgd does not support this"),
        ({"global_period": 0}, "global_period must be a whole number, at least 1, got 0"),
        ({"local_period": True}, "local_period must be a whole number, at least 1, got True"),
        ({"local_period": 17}, "local_period=17 is above global_period=16.*a quarter of global_period is usual"),
        ({"local_prox": 1}, "local_prox: a strength must be at least 0 .no pull. and below 1, got 1 at step 1"),
        ({"algorithm": "easgd", "alpha": abs}, "alpha must be a number, .*: all ranks must move the center alike"),
        ({"buffers": "root"}, "buffers must be 'average' or 'local', got 'root'"),
        ({"buffers": "mean"}, "must be one of 'average', 'local', 'root'"),
    ],
)
def test_wrong_options_of_leaders(options: dict[str, Any], hint: str):
    with pytest.raises(ValueError, match=hint):
        LeaderOptions(**options).check(None)


def test_defaults_of_leaders_are_those_of_the_algorithm():
    assert LeaderOptions().resolved() == ALGORITHMS["lsgd"].options | {"local_period": 4}
    given = LeaderOptions("easgd", global_period=8, beta=0.5).resolved()
    assert given == {"global_period": 8, "alpha": None, "beta": 0.5}


def test_a_message_about_options_becomes_one_about_flags():
    text = "local_period=17 is above global_period=16: a quarter of global_period is usual, or group='host'"
    assert in_flags(text, LeaderOptions) == (
        "--local-period 17 is above --global-period 16: a quarter of --global-period is usual, or --group host"
    )
    assert in_flags("group must be 1, got 'x'", LeaderOptions) == "--group must be 1, got 'x'"


def test_values_by_epoch():
    assert read_by_epoch("0:1, 30:2", "0:1,30:2", int) == {0: 1, 30: 2}


@pytest.mark.parametrize("passes", [0, -1, 1.0, "2", None, True])
def test_wrong_passes(passes: Any):
    with pytest.raises(ValueError, match=r"backward_passes_per_step must be an integer of at least 1, got"):
        check_passes(passes)
    check_passes(3)


AVERAGE, SUM, ADASUM = 0, 1, 2


def test_scales():
    assert scales(AVERAGE, AVERAGE, SUM, 1.0, 4) == (1.0, 0.25)
    assert scales(AVERAGE, AVERAGE, SUM, 8.0, 4) == (0.125, 2.0)
    assert scales(SUM, AVERAGE, SUM, 1.0, 4) == (1.0, 1.0)


@pytest.mark.parametrize("op", [ADASUM, None, "average"])
def test_wrong_op(op: Any):
    with pytest.raises(ValueError, match=r"op=.* does not go with partial allreduce.*take hvd\.Average or hvd\.Sum"):
        scales(op, AVERAGE, SUM, 1.0, 4)


@pytest.mark.parametrize("predivide", [0, -1.0, float("inf"), float("nan"), "2", None, True])
def test_wrong_predivide(predivide: Any):
    with pytest.raises(ValueError, match=r"gradient_predivide_factor must be a finite number above 0, got"):
        scales(AVERAGE, AVERAGE, SUM, predivide, 4)


def test_predivide_does_not_go_with_sum():
    with pytest.raises(ValueError, match="leave it out with Sum"):
        scales(SUM, AVERAGE, SUM, 2.0, 4)
