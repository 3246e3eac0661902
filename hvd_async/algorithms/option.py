"""Options of the families, described as data: documentation, command lines and checks take them from one place."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
BUFFERS = ("average", "local", "root")
"""How batch-norm statistics may agree."""
PLACEHOLDER = "        Own options: see ``{}``.\n"
"""The line of a factory's docstring that ``documented`` replaces."""


@dataclass(frozen=True)
class Whole:
    """Whole numbers, as they may be given.

    Attributes:
        least: the smallest.
    """

    least: int

    def __call__(self, text: str) -> int:
        """Return the number that a text says.

        Raises:
            ValueError: it says none, or one that is too small.
        """
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if value < self.least:
            raise ValueError(f"{value} is too small: give {self.least} or more")
        return value

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no such number.

        Raises:
            ValueError: with a hint.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            raise ValueError(f"{name}={value!r}: take {self.least} or more")


@dataclass(frozen=True)
class Real:
    """Finite numbers in [least, below), or in (least, below) if they are ``above`` it, as they may be given."""

    least: float
    below: float = math.inf
    above: bool = False

    def __call__(self, text: str) -> float:
        """Return the number that a text says.

        Raises:
            ValueError: it says none, or one out of bounds.
        """
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not self._holds(value):
            raise ValueError(f"{text} must be {self._bounds}")
        return value

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no such number.

        Raises:
            ValueError: with a hint.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not self._holds(value):
            raise ValueError(f"{name}={value!r} must be a number, {self._bounds}")

    def _holds(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value < self.below and not (self.above and value == self.least)

    @property
    def _bounds(self) -> str:
        most = f" and below {self.below:g}" if self.below < math.inf else ""
        return f"{'above' if self.above else 'at least'} {self.least:g}{most}"


def read_by_epoch(text: str, example: str, read: Callable[[str], T]) -> dict[int, T]:
    """Return values by epoch from EPOCH:VALUE,EPOCH:VALUE.

    Args:
        text: to read.
        example: a right one, for errors.
        read: a value.

    Raises:
        ValueError: it is no such list, or its epochs do not rise.
    """
    found: dict[int, T] = {}
    for part in text.split(","):
        epoch, colon, value = part.partition(":")
        if not (colon and epoch.strip().isdecimal()):
            raise ValueError(f"{text!r} is not a list of EPOCH:VALUE: write it as {example}")
        if found and int(epoch) <= max(found):
            raise ValueError(f"{text!r}: the epochs must rise, as in {example}")
        found[int(epoch)] = read(value.strip())
    return found


def check_one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Refuse what is none of these names.

    Raises:
        ValueError: with a hint.
    """
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known: take one of {', '.join(map(repr, known))}")


def check_hosts(ranks: int, local_size: int) -> None:
    """Refuse hosts of ``local_size`` ranks into which so many ranks cannot be parted.

    Raises:
        ValueError: it leaves some over.
    """
    if local_size < 1 or ranks % local_size:
        raise ValueError(
            f"hierarchical: {local_size} ranks a host do not divide {ranks} ranks into hosts of equal size"
        )


@dataclass(frozen=True)
class Option:
    """One option of a family beside its name, type and default, which are those of the dataclass's field.

    Attributes:
        doc: for the factories' docstrings.
        help: for the flag, where that is told otherwise; empty: ``doc``.
        absent: what stands in place of the default for people, such as what None means.
        read: a value from a flag's text; raises ValueError with a hint. None: the text itself.
        choices: all values that a flag may have; empty: any.
        metavar: of the flag's value.
        flags: names of its flag, if not as the option's; empty: it has none.
    """

    doc: str
    help: str = ""
    absent: str = ""
    read: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    flags: tuple[str, ...] | None = None


def option(default: Any, doc: str, **more: Any) -> Any:
    """Return the field of a dataclass for an option; ``more`` as in ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(doc, **more)})


def options_of(family: type) -> dict[str, Option]:
    """Return the options that a family's dataclass has, by name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(family)}


def picked(family: type[T], given: Mapping[str, Any]) -> T:
    """Return a family's options from all arguments of a factory."""
    return family(**{name: given[name] for name in options_of(family)})


def documented(family: type) -> Callable[[F], F]:
    """Put the descriptions of a family's options into a factory's docstring, in place of the line ``PLACEHOLDER``."""

    def complete(factory: F) -> F:
        if factory.__doc__ is not None:  # (python -OO takes docstrings away)
            lines = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 12)
            entries = (f"{name}: {described.doc}." for name, described in options_of(family).items())
            text = "".join(f"{lines.fill(entry)}\n" for entry in entries)
            line = PLACEHOLDER.format(family.__name__)
            if line not in factory.__doc__:
                raise ValueError(f"the docstring of {factory.__name__} lacks the line {line!r}")
            factory.__doc__ = factory.__doc__.replace(line, text)
        return factory

    return complete


def either(names: Iterable[str], last_joint: str = "or") -> str:
    """Return the names as in a sentence: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} {last_joint} {last}" if first else last


def in_flags(text: str, family: type) -> str:
    """Return a message about options as one about their flags: "grace=-1" becomes "--grace -1"."""
    known = options_of(family)
    text = re.sub(
        rf"\b({'|'.join(known)})=(?:'([^']*)'|\"([^\"]*)\"|([^\s,;:]+))",
        lambda found: f"{flag(found[1])} {found[2] or found[3] or found[4] or ''}",
        text,
    )
    longer = [name for name in known if "_" in name]  # (others are words too)
    return re.sub(rf"\b({'|'.join(longer)})\b", lambda found: flag(found[1]), text)


def flag(name: str) -> str:
    """Return an option's flag."""
    return f"--{name.replace('_', '-')}"
