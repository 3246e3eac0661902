"""Options of the families as data: the single source of documentation, command-line flags and checks."""

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
"""Ways in which batch-norm statistics agree in a drain."""
PLACEHOLDER = "        Own options: see ``{}``.\n"
"""The line of a factory's docstring that ``documented`` replaces."""


@dataclass(frozen=True)
class Whole:
    """Whole-number values of an option.

    Attributes:
        least: smallest allowed value.
    """

    least: int

    def __call__(self, text: str) -> int:
        """Return the number that a text contains.

        Raises:
            ValueError: the text is not a whole number, or the number is too small.
        """
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number, got {text!r}") from None
        if value < self.least:
            raise ValueError(f"must be at least {self.least}, got {value}")
        return value

    def check(self, name: str, value: Any) -> None:
        """Check that a value is such a number.

        Raises:
            ValueError: it is not.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            raise ValueError(f"{name} must be a whole number, at least {self.least}, got {value!r}")


@dataclass(frozen=True)
class Real:
    """Values of an option that are finite numbers in [least, below), or in (least, below) with ``above``."""

    least: float
    below: float = math.inf
    above: bool = False

    def __call__(self, text: str) -> float:
        """Return the number that a text contains.

        Raises:
            ValueError: the text is not a number, or the number is out of bounds.
        """
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"must be a number, got {text!r}") from None
        if not self._holds(value):
            raise ValueError(f"must be {self._bounds}, got {text}")
        return value

    def check(self, name: str, value: Any) -> None:
        """Check that a value is such a number.

        Raises:
            ValueError: it is not.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not self._holds(value):
            raise ValueError(f"{name} must be a number, {self._bounds}, got {value!r}")

    def _holds(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value < self.below and not (self.above and value == self.least)

    @property
    def _bounds(self) -> str:
        most = f" and below {self.below:g}" if self.below < math.inf else ""
        return f"{'above' if self.above else 'at least'} {self.least:g}{most}"


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
    """Description of an option of a family. Its name, type and default are those of the dataclass's field.

    Attributes:
        doc: text for the factories' docstrings.
        help: help text of the flag; empty: ``doc``.
        absent: text that help shows instead of the default, such as the meaning of None.
        read: returns the value for a flag's text, or raises ValueError with a hint. None: the text is the value.
        choices: all values that the flag accepts; empty: any.
        metavar: placeholder for the flag's value in help texts.
        flags: names of the flag, if they differ from the option's name; empty: there is no flag.
    """

    doc: str
    help: str = ""
    absent: str = ""
    read: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    flags: tuple[str, ...] | None = None


def option(default: Any, doc: str, **more: Any) -> Any:
    """Return a dataclass field for an option; ``more`` as in ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(doc, **more)})


def options_of(family: type) -> dict[str, Option]:
    """Return the options of a family's dataclass, by name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(family)}


def picked(family: type[T], given: Mapping[str, Any]) -> T:
    """Return a family's options, picked from all arguments of a factory."""
    return family(**{name: given[name] for name in options_of(family)})


def documented(family: type) -> Callable[[F], F]:
    """Replace the line ``PLACEHOLDER`` of a factory's docstring by the descriptions of a family's options."""

    def complete(factory: F) -> F:
        if factory.__doc__ is not None:  # (python -OO removes docstrings)
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
