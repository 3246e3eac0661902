"""Public modules export what the API's pages document, and what is Horovod's; nothing that they only import."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

from scripts.website import api
from tests.fixtures import frozen

PAGES = "".join(api.pages().values())
MODULES = re.findall(r"^::: (\S+)\n    options: \{members: false", PAGES, re.MULTILINE)
HOROVODS_OWN = re.findall(r"^### .* \{ #(\S+) \}$", PAGES, re.MULTILINE)
DOCUMENTED = {*re.findall(r"^::: (\S+)$", PAGES, re.MULTILINE), *HOROVODS_OWN} - set(MODULES)
STAND_INS = {
    module: module.replace("hvd_async", "horovod", 1)
    for module in MODULES
    if module.startswith(("hvd_async.torch", "hvd_async.tensorflow"))
}
"""By module the one of Horovod's that it takes the place of."""


def horovods(module: str) -> set[str]:
    """The public names of Horovod's module; none where there is none."""
    return set(dir(importlib.import_module(STAND_INS[module]))) if module in STAND_INS else set()


def test_all_public_modules_are_looked_at():
    assert {"hvd_async", "hvd_async.errors", "hvd_async.tensorflow.keras.callbacks"} <= set(MODULES)
    assert len(MODULES) == 12


@pytest.mark.parametrize("name", MODULES)
def test_what_is_exported_is_documented_or_horovods(name):
    module = importlib.import_module(name)
    parts = {part for part in module.__all__ if f"{name}.{part}" in MODULES}
    own = {each for each in module.__all__ if f"{name}.{each}" in DOCUMENTED}
    assert set(module.__all__) - own - parts - horovods(name) <= {"__version__"}
    for each in own | parts:
        one = getattr(module, each)
        described = inspect.isclass(one) or inspect.isroutine(one) or inspect.ismodule(one)
        assert not described or one.__doc__, f"{each} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_what_is_documented_is_exported(name):
    module = importlib.import_module(name)
    documented = {each.rpartition(".")[2] for each in DOCUMENTED if each.rpartition(".")[0] == name}
    assert documented
    assert not documented - set(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_signatures_are_ones_that_users_know():
    assert frozen.signatures(DOCUMENTED) == frozen.SIGNATURES.read_text("utf-8"), "see tests/fixtures/frozen.py"


@pytest.mark.parametrize("name", [name for name in MODULES if hasattr(importlib.import_module(name), "__path__")])
def test_a_package_shows_nothing_else(name):
    """(In a module of one file it does no harm that names which it imports are seen.)"""
    module = importlib.import_module(name)
    seen = {each: value for each, value in vars(module).items() if not each.startswith("_")}
    more = seen.keys() - set(module.__all__) - {"Any", "annotations"}
    assert not [each for each in more if not isinstance(seen[each], ModuleType)]


@pytest.mark.parametrize("name", [name for name in STAND_INS if not name.endswith(".elastic")])
def test_all_of_horovods_that_a_star_takes_is_exported(name):
    """(``elastic`` has the names of its idiom.)"""
    theirs = importlib.import_module(STAND_INS[name])
    wanted = {each for each, one in vars(theirs).items() if each[0] != "_" and not isinstance(one, ModuleType)}
    assert len(wanted) > 5
    assert not wanted - set(importlib.import_module(name).__all__)


@pytest.mark.parametrize(
    ("binding", "asked"), [("torch", "horovod"), ("tensorflow", ""), ("tensorflow", "torch"), ("tensorflow.keras", "")]
)
def test_without_horovod_an_import_that_needs_it_says_how_to_build_it(binding, asked):
    code = "import os, sys\nsys.modules['horovod'] = None\n"
    code += f"os.environ['HVD_ASYNC_TRANSPORT'] = {asked!r}\nimport hvd_async.{binding}"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), ended.stderr
    assert "scripts/install_horovod.sh" in last
    if binding != "torch":
        assert "hvd_async.tensorflow needs Horovod" in last
        assert "Only PyTorch trains without Horovod" in last
