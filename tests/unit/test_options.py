"""Options of the families: how functions take them, and which values are refused with a hint."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import pickle
import typing
from typing import Any

import pytest

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.option import in_flags, option, options_of, read_by_epoch, takes, with_options
from hvd_async.algorithms.registry import ALGORITHMS, OPTIONS
from hvd_async.optimizers.factories import check_passes, scales


@dataclasses.dataclass(frozen=True)
class Horovods:
    """Arguments of a wrapper that are not options."""

    optimizer: str
    op: int = 0
    _: dataclasses.KW_ONLY
    model: str | None = option(None, "the model", before="buffers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(EagerOptions, Horovods):
    """Arguments of a wrapper."""


@takes(Arguments)
def wrapper(given: Arguments) -> Arguments:
    """Wrap an optimizer.

    Args:
        optimizer: any.
        Own options: see ``Arguments``.
    """
    return given


def test_a_function_takes_the_fields_of_its_arguments():
    names = [*dict.fromkeys(each.name for each in dataclasses.fields(EagerOptions))]
    parameters = inspect.signature(wrapper).parameters
    assert list(parameters) == ["optimizer", "op", *names[:-1], "model", names[-1]]
    assert [str(one) for one in parameters.values() if one.kind is not one.KEYWORD_ONLY] == [
        "optimizer: 'str'",
        "op: 'int' = 0",
    ]
    assert wrapper("sgd", 1, quorum="all") == Arguments("sgd", 1, quorum="all")
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper
    assert typing.get_type_hints(wrapper)["quorum"] == str | int | float


def test_its_docstring_describes_the_options():
    assert wrapper.__doc__ is not None
    assert "Args:\n    optimizer: any.\n    quorum: ranks that must have arrived" in wrapper.__doc__
    assert "\n    model: the model.\n    buffers: " in wrapper.__doc__
    assert max(map(len, wrapper.__doc__.splitlines())) <= 116
    with pytest.raises(ValueError, match="the docstring lacks the line '    Own options: see ``Arguments``"):
        with_options("Wrap an optimizer.", Arguments)


@pytest.mark.parametrize(
    ("args", "options", "problem"),
    [
        ((), {}, "missing a required argument: 'optimizer'"),
        (("sgd",), {"quorom": "all"}, "got an unexpected keyword argument 'quorom'"),
        (("sgd", 0, "all"), {}, "too many positional arguments"),
        (("sgd",), {"optimizer": "adam"}, "multiple values for argument 'optimizer'"),
    ],
)
def test_a_wrong_call_is_an_error_of_the_function(args: Any, options: dict[str, Any], problem: str):
    with pytest.raises(TypeError, match=rf"^wrapper\(\) {problem}$"):
        wrapper(*args, **options)


TYPED = """
from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.option import takes

@takes(EagerOptions)
def wrapper(given: EagerOptions) -> int:
    return given.max_staleness

wrapper(quorum="all", max_staleness=3)
wrapper(quorom="all")
wrapper(max_staleness="3")
wrapper("all")
"""


def test_a_type_checker_knows_the_options(tmp_path: pathlib.Path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "typed.py").write_text(TYPED, encoding="utf-8")
    said, problem, _ = api.run(["--cache-dir", str(tmp_path), "--no-error-summary", str(tmp_path / "typed.py")])
    assert not problem
    first, second, third = said.splitlines()
    assert 'Unexpected keyword argument "quorom"' in first
    assert 'Argument "max_staleness" to "wrapper" has incompatible type "str"; expected "int"' in second
    assert "Too many positional arguments" in third


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
        {"quorum": 1.0, "grace": 0},
        {"quorum": "all", "grace": 0.5},
        {"quorum": 1, "max_staleness": 1, "grace": 3},
        {"quorum": 0.01},
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
    given = LeaderOptions(algorithm="easgd", global_period=8, beta=0.5).resolved()
    assert given == {"global_period": 8, "alpha": None, "beta": 0.5}


def test_a_message_about_options_becomes_one_about_flags():
    text = "local_period=17 is above global_period=16: a quarter of global_period is usual, or group='host'"
    assert in_flags(text, LeaderOptions) == (
        "--local-period 17 is above --global-period 16: a quarter of --global-period is usual, or --group host"
    )
    assert in_flags("group must be 1, got 'x'", LeaderOptions) == "--group must be 1, got 'x'"


def test_values_by_epoch():
    assert read_by_epoch("0:1, 30:2", "0:1,30:2", int) == {0: 1, 30: 2}


AVERAGE, SUM, ADASUM = 0, 1, 2


def test_scales():
    assert scales(AVERAGE, AVERAGE, SUM, 1.0, 4) == (1.0, 0.25)
    assert scales(AVERAGE, AVERAGE, SUM, 8.0, 4) == (0.125, 2.0)
    assert scales(SUM, AVERAGE, SUM, 1.0, 4) == (1.0, 1.0)
    check_passes(3)


PASSES = "backward_passes_per_step must be an integer of at least 1, got"
OP = r"op=.* does not go with partial allreduce.*take hvd\.Average or hvd\.Sum"
PREDIVIDE = "gradient_predivide_factor must be a finite number above 0, got"


@pytest.mark.parametrize(
    ("call", "arguments", "hint"),
    [
        *((check_passes, (value,), PASSES) for value in (0, -1, 1.0, "2", None, True)),
        *((scales, (op, AVERAGE, SUM, 1.0, 4), OP) for op in (ADASUM, None, "average")),
        *(
            (scales, (AVERAGE, AVERAGE, SUM, value, 4), PREDIVIDE)
            for value in (0, -1.0, float("inf"), float("nan"), "2", None, True)
        ),
        (scales, (SUM, AVERAGE, SUM, 2.0, 4), "leave it out with Sum"),
    ],
)
def test_wrong_arguments_of_horovods_optimizers(call: Any, arguments: tuple[Any, ...], hint: str):
    with pytest.raises(ValueError, match=hint):
        call(*arguments)
