"""Options as fields of dataclasses: the single source of signatures, documentation, command-line flags and checks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")
BUFFERS = ("average", "local", "root")
"""Ways in which batch-norm statistics agree in a drain."""
PLACEHOLDER = "    Own options: see ``{}``."
"""The line of a function's docstring that ``with_options`` replaces."""


@dataclass(frozen=True)
class Real:
    """Values of an option that are finite numbers in [least, below), or in (least, below) with ``above``.

    Attributes:
        or_inf: whether infinity is valid too.
        what: description of the values in error messages; empty: "a number, at least ...".
    """

    kind: ClassVar[type] = float
    noun: ClassVar[str] = "a number"
    least: float
    below: float = math.inf
    above: bool = False
    or_inf: bool = False
    what: str = ""

    def __call__(self, text: str) -> Any:
        """Return the number that a text contains.

        Raises:
            ValueError: the text is not such a number, or the number is out of bounds.
        """
        try:
            value = self.kind(text)
        except ValueError:
            raise ValueError(f"must be {self.noun}, got {text!r}") from None
        if not self._holds(value):
            raise ValueError(f"must be {self._bounds}, got {text}")
        return value

    def check(self, name: str, value: Any) -> None:
        """Check that a value is such a number.

        Raises:
            ValueError: it is not.
        """
        if isinstance(value, bool) or not isinstance(value, int | self.kind) or not self._holds(value):
            raise ValueError(f"{name} must be {self.what or f'{self.noun}, {self._bounds}'}, got {value!r}")

    def _holds(self, value: Any) -> bool:
        if value == math.inf:
            return self.or_inf
        inside: bool = self.least <= value < self.below  # (false of NaN)
        return inside and not (self.above and value == self.least)

    @property
    def _bounds(self) -> str:
        most = f" and below {self.below:g}" if self.below < math.inf else ""
        return f"{'above' if self.above else 'at least'} {self.least:g}{most}"


class Whole(Real):
    """Values of an option that are whole numbers, at least ``least``."""

    kind = int
    noun = "a whole number"

    def __init__(self, least: int, what: str = "") -> None:
        super().__init__(least, what=what)


def read_by_epoch(text: str, example: str, read: Callable[[str], T]) -> dict[int, T]:
    """Return values by epoch, read from EPOCH:VALUE,EPOCH:VALUE.

    Args:
        text: text to read.
        example: a valid text, for error messages.
        read: reads one value.

    Raises:
        ValueError: the text has another form, or its epochs do not increase.
    """
    found: dict[int, T] = {}
    for part in text.split(","):
        epoch, colon, value = part.partition(":")
        if not (colon and epoch.strip().isdecimal()):
            raise ValueError(f"must be a list of EPOCH:VALUE such as {example}, got {text!r}")
        if found and int(epoch) <= max(found):
            raise ValueError(f"epochs must increase, as in {example}, got {text!r}")
        found[int(epoch)] = read(value.strip())
    return found


@dataclass(frozen=True)
class ByEpoch:
    """Whole-number values of an option that may also be a mapping of such values by epoch.

    Attributes:
        one: bounds of a value.
        example: text of a mapping, as a flag reads it.
    """

    one: Whole
    example: str

    def __call__(self, text: str) -> Any:
        """Return the number, or the numbers by epoch, that a text contains.

        Raises:
            ValueError: as ``Whole`` and ``read_by_epoch``; or the text does not begin with epoch 0.
        """
        if ":" not in text:
            return self.one(text)
        found = read_by_epoch(text, self.example, self.one)
        if 0 not in found:
            raise ValueError(f"{text!r} must begin with epoch 0, as in {self.example}")
        return found

    def check(self, name: str, value: Any) -> None:
        """Check the value of an epoch.

        Raises:
            ValueError: it is out of bounds.
        """
        self.one.check(name, value)


def check_one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Check that a value is one of these names.

    Raises:
        ValueError: it is not.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_hosts(ranks: int, local_size: int) -> None:
    """Check that ``ranks`` ranks can be divided into hosts of ``local_size`` ranks.

    Raises:
        ValueError: some ranks are left over.
    """
    if local_size < 1 or ranks % local_size:
        raise ValueError(
            f"hierarchical: {local_size} ranks per host do not divide {ranks} ranks into hosts of equal size"
        )


@dataclass(frozen=True)
class Option:
    """Description of an option. Its name, type and default are those of the dataclass's field.

    Attributes:
        doc: text for docstrings.
        help: help text of the flag; empty: ``doc``.
        absent: text that help shows instead of the default, such as the meaning of None.
        read: returns the value for a flag's text, or raises ValueError with a hint. None: the text is the value. If
            it has a method ``check``, ``check_bounds`` calls that.
        choices: all values that the flag accepts; empty: any.
        metavar: placeholder for the flag's value in help texts.
        flags: names of the flag, if they differ from the option's name; empty: there is no flag.
        before: name of the option that follows in signatures, if this is not the order of the fields.
        unsupported: error message if it is set for an algorithm without this option, with {0} for the algorithm's
            name; empty: the family has one message for all its options.
        no_effect: value that such an algorithm accepts, besides the default.
        fixed: whether ``switch()`` cannot change it.
    """

    doc: str
    help: str = ""
    absent: str = ""
    read: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    flags: tuple[str, ...] | None = None
    before: str = ""
    unsupported: str = ""
    no_effect: Any = None
    fixed: bool = False


def option(default: Any, doc: str, **more: Any) -> Any:
    """Return a dataclass field for an option; ``more`` as in ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(doc, **more)})


def options_of(arguments: type) -> dict[str, Option]:
    """Return the options among a dataclass's fields by name, in the order of signatures."""
    described = {each.name: each.metadata["option"] for each in dataclasses.fields(arguments) if each.metadata}
    order = [name for name, one in described.items() if not one.before]
    for name, one in described.items():
        if one.before:
            order.insert(order.index(one.before), name)
    return {name: described[name] for name in order}


def check_bounds(options: Any, family: type) -> None:
    """Check the options of a family by the method ``check`` of each ``read``, if it has one.

    None is valid where it is the default.

    Args:
        options: an object of ``family``, or of a subclass.
        family: a dataclass of options.

    Raises:
        ValueError: a value is out of bounds.
    """
    for name, described in options_of(family).items():
        value, check = getattr(options, name), getattr(described.read, "check", None)
        if check is not None and not (value is None and getattr(family, name) is None):
            check(name, value)


def takes(
    arguments: Callable[P, T], instead: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[[T], Any]], Callable[P, Any]]:
    """Turn a function of an object of ``arguments`` into a function of the object's fields.

    Callers, ``help()`` and type checkers see the fields as parameters: options by keyword, other fields by position
    too. In the docstring the options' descriptions replace the line ``PLACEHOLDER``.

    Args:
        arguments: a dataclass; its options are the fields made by ``option``, also those of its bases.
        instead: what to do without keywords that other functions have, by keyword.
    """
    kind = cast(type, arguments)
    fields, types, options = inspect.signature(kind).parameters, typing.get_type_hints(kind), options_of(kind)
    names = [*(name for name in fields if name not in options), *options]
    signature = inspect.Signature([fields[name] for name in names], return_annotation="Any")

    def complete(function: Callable[[T], Any]) -> Callable[P, Any]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                hints = [f": {hint}" for name, hint in instead.items() if name in kwargs]
                raise TypeError(f"{function.__name__}() {error}{''.join(hints[:1])}") from None
            return function(arguments(*args, **kwargs))

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {name: types[name] for name in names} | {"return": Any}
        if function.__doc__ is not None:  # (python -OO removes docstrings)
            call.__doc__ = with_options(inspect.cleandoc(function.__doc__), kind)
        return call

    return complete


def with_options(docstring: str, arguments: type) -> str:
    """Return a docstring whose line ``PLACEHOLDER`` is replaced by the descriptions of a dataclass's options.

    Raises:
        ValueError: it has no such line.
    """
    line = PLACEHOLDER.format(arguments.__name__)
    if line not in docstring:
        raise ValueError(f"the docstring lacks the line {line!r}")
    lines = textwrap.TextWrapper(116, initial_indent=" " * 4, subsequent_indent=" " * 8)
    entries = (lines.fill(f"{name}: {described.doc}.") for name, described in options_of(arguments).items())
    return docstring.replace(line, "\n".join(entries))


def either(names: Iterable[str], last_joint: str = "or") -> str:
    """Return the names joined as in a sentence: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} {last_joint} {last}" if first else last


def in_flags(text: str, family: type) -> str:
    """Return a message about options as one about their flags: "grace=-1" becomes "--grace -1"."""
    known = options_of(family)
    text = re.sub(rf"\b({'|'.join(known)}) must be\b", lambda found: f"{flag(found[1])} must be", text)
    text = re.sub(
        rf"\b({'|'.join(known)})=(?:'([^']*)'|\"([^\"]*)\"|([^\s,;:]+))",
        lambda found: f"{flag(found[1])} {found[2] or found[3] or found[4] or ''}",
        text,
    )
    longer = [name for name in known if "_" in name]  # (the others are ordinary words too)
    return re.sub(rf"\b({'|'.join(longer)})\b", lambda found: flag(found[1]), text)


def flag(name: str) -> str:
    """Return an option's flag."""
    return f"--{name.replace('_', '-')}"


# -- switches of stream order ------------------------------------------------------------------------------------------


def confirms() -> bool:
    """Return whether HVD_ASYNC_CONFIRM asks that results are used only once the engine has seen them complete."""
    return os.environ.get("HVD_ASYNC_CONFIRM", "0") not in ("", "0")


def agrees() -> bool:
    """Return whether HVD_ASYNC_AGREE lets ranks announce a step at the hand-over of its first bucket."""
    return os.environ.get("HVD_ASYNC_AGREE", "1") != "0"
