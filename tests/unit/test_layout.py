"""Dependencies point one way, and frameworks stay in their bindings: read from the source."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
from collections.abc import Iterator

import pytest

from hvd_async.algorithms.option import BUFFERS
from hvd_async.algorithms.registry import ALGORITHMS
from tests.unit.forks import run_scripts

ROOT = pathlib.Path(__file__).resolve().parents[2]
STOREYS = [
    {"finite_time"},  # what a topology is made of
    {"errors", "topology", "stats"},  # public data: leaves
    {"runtime", "mixing"},  # runs any algorithm, knows none
    {"algorithms"},
    {"optimizers", "testing", "simulation", "traces"},  # framework-neutral users of algorithms; what records
    {"monitor"},  # what a run shows while it lasts, in any framework
    {"torch", "tensorflow"},  # the bindings, which record too
    {"advisor", "doctor"},  # from traces, by simulation; looks at a machine and its network
    {"cli"},
    {"__main__"},
    {"runner"},  # of the training scripts: nothing else in the package imports it
    {"torch_models", "tf_models"},
    {"jobs"},  # of scripts/benchmarks: programs that run under horovodrun
    {"scripts"},
]
"""From the ground: an import points to a lower storey, or stays inside its package."""
STOREY = {name: level for level, storey in enumerate(STOREYS) for name in storey}
FAMILIES = {"eager", "gossip", "leader"}
PURE = {
    "config",
    "machine",
    "quorum",
    "extrapolation",
    "quasi_global",
    "plan",
    "selection",
    "lsgd",
    "easgd",
    "push_sum",
    "outer",
    "option",
}
"""Files of a family that need no thread, socket or clock."""
FOR_PURE = {"protocol", "machine"}
"""What they may import of the runtime."""
FRAMEWORKS = {"torch", "torchvision", "tensorflow", "keras", "horovod"}
MAY = {
    "torch": {"torch", "horovod.torch", "horovod.common"},
    "tensorflow": {"tensorflow", "keras", "horovod.tensorflow", "horovod.common"},
    "torch_models": {"torch", "torchvision"},
    "tf_models": {"tensorflow", "keras"},
    "jobs": FRAMEWORKS,
    "doctor": {"horovod.runner"},
    "scripts": {"horovod.runner"},
}


def sources() -> list[pathlib.Path]:
    """Every Python file of the project, tests included."""
    folders = ("hvd_async", "torch_models", "tf_models", "scripts", "tests")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def unit(module: str) -> str:
    """What a dotted name belongs to in STOREYS: "hvd_async.torch.update" to "torch", "torch_models.x" to itself."""
    parts = module.split(".")
    if parts[:3] == ["scripts", "benchmarks", "jobs"] or module == "scripts.nccl_ranks":
        return "jobs"
    return parts[1] if parts[0] == "hvd_async" and len(parts) > 1 else parts[0]


def module_of(path: pathlib.Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
    """All modules that a file imports, anywhere in it, as absolute dotted names."""
    found: set[str] = set()
    package = module_of(path).split(".")
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                outer = package[: len(package) - node.level + (path.name == "__init__.py")]
                base = ".".join([*outer, base]).strip(".")
            found.add(base)
            if base in ("hvd_async", "horovod"):  # "from hvd_async import activation"
                found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


LIBRARY = [path for path in sources() if not path.is_relative_to(ROOT / "tests")]


def test_every_module_has_its_place():
    unknown = {unit(module_of(path)) for path in LIBRARY} - STOREY.keys() - {"hvd_async"}
    assert not unknown, f"add {unknown} to STOREYS, each above all that it imports"


def pairs() -> Iterator[tuple[pathlib.Path, str]]:
    """Each file of ``LIBRARY`` with each module that it imports."""
    return ((path, name) for path in LIBRARY for name in sorted(imports(path)))


def test_imports_point_down():
    """``hvd_async/__init__.py`` imports no part: ``import hvd_async`` is to need no framework."""

    def up(own: str, name: str) -> bool:
        inside = name.startswith("hvd_async.") and unit(name) != own
        return inside and (own == "hvd_async" or STOREY[unit(name)] >= STOREY[own])

    found = [f"{module_of(path)} imports {name}" for path, name in pairs() if up(unit(module_of(path)), name)]
    assert not found, "what is imported stands higher or on the same floor"


def test_frameworks_stay_in_their_bindings():
    for path, name in pairs():
        allowed = tuple(f"{each}." for each in MAY.get(unit(module_of(path)), ()))
        assert name.split(".")[0] not in FRAMEWORKS or f"{name}.".startswith(allowed), f"{path} imports {name}"


BENCHMARKS = {
    "cases": {"cases", "support"},
    "support": {"support"},
    "jobs": {"jobs", "support"},
}
"""Parts of the benchmarks, and what each may import of them: the launching side imports no job, so no framework."""


def test_benchmarks_point_down():
    def part(name: str) -> str | None:
        return name.split(".")[2] if name.startswith("scripts.benchmarks.") else None

    inside = {(part(module_of(path)), part(name)) for path, name in pairs()}
    assert not [f"{own} imports {other}" for own, other in inside if own and other and other not in BENCHMARKS[own]]


def family(module: str) -> str | None:
    """The family of algorithms that a module belongs to, if it does to one."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["hvd_async", "algorithms"] and len(parts) > 2 and parts[2] in FAMILIES else None


def test_no_family_imports_another():
    families = ((module_of(path), name) for path, name in pairs() if family(module_of(path)) and family(name))
    assert not [f"{own} imports {name}" for own, name in families if family(own) != family(name)]


def pure_files() -> list[pathlib.Path]:
    """Those of all families that are there."""
    folders = [ROOT / "hvd_async" / "algorithms" / name for name in sorted(FAMILIES)]
    return [path for folder in folders for path in sorted(folder.glob("*.py")) if path.stem in PURE]


def test_what_is_pure_needs_of_the_runtime_only_messages():
    allowed = {"hvd_async.runtime": FOR_PURE, "hvd_async.algorithms.": {*PURE, *FAMILIES}}
    for path in pure_files():
        for name in imports(path):
            for part, names in allowed.items():
                assert not name.startswith(part) or name.split(".")[-1] in names, f"{module_of(path)} imports {name}"


def test_each_family_has_its_pure_half():
    found = {(path.parent.name, path.stem) for path in pure_files()}
    assert found >= {(name, file) for name in FAMILIES for file in ("config", "machine")}


def test_the_reader_of_imports_sees_all_kinds(tmp_path):
    """So that the tests above cannot be passed by a spelling."""
    code = (
        "import a.b\nfrom c import d\nfrom hvd_async import engine\ndef f():\n    import keras\n"
        "    importlib.import_module('torch')\n    from ..x import y\n    from . import z\n"
    )
    path = ROOT / "hvd_async" / "torch" / "imaginary.py"
    original = pathlib.Path.read_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathlib.Path, "read_text", lambda self, **o: code if self == path else original(self, **o))
        assert imports(path) == {"a.b", "c", "hvd_async", "hvd_async.engine", "keras", "torch", "hvd_async.x",
                                 "hvd_async.torch"}  # fmt: skip


def test_the_core_needs_no_framework_and_importing_the_package_no_numpy(tmp_path):
    modules = [module_of(path) for path in LIBRARY if path.is_relative_to(ROOT / "hvd_async")]
    core = [name for name in modules if STOREY.get(unit(name), 0) < STOREY["torch"]]
    assert len(core) > 40
    hidden = "for name in {names!r}:\n    sys.modules[name] = None\n"
    alone = hidden.format(names=[*FRAMEWORKS, "numpy"]) + "import hvd_async\nprint(hvd_async.__version__)"
    every = hidden.format(names=FRAMEWORKS) + f"for name in {core!r}:\n    importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for end in run_scripts(tmp_path, [alone, every], before="import importlib", environment=environment):
        assert end.code == 0, end.err


def names_decided_by(code: ast.AST) -> set[str]:
    """The texts that code compares something with, or looks up in a dictionary that it writes down."""
    found: list[ast.AST | None] = []
    for node in ast.walk(code):
        if isinstance(node, ast.Compare):
            found += [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            found.append(node.value)
        elif isinstance(node, ast.Dict):
            found += node.keys
    texts = (leaf for one in found if one is not None and not isinstance(one, ast.Dict) for leaf in ast.walk(one))
    return {leaf.value for leaf in texts if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)}


def test_no_code_decides_by_an_algorithms_name():
    """The tables of the families answer; they alone are by name."""
    ours = ALGORITHMS.keys() - FAMILIES - set(BUFFERS)  # ("eager" is the name of a family too, "local" a policy)
    for path in LIBRARY:
        tables = family(module_of(path)) is not None and path.stem == "config"
        if path.is_relative_to(ROOT / "hvd_async") and not tables:
            decided = names_decided_by(tree(path))
            assert not decided & ours, f"{path}: ask the registry what sets the algorithm apart"


def test_the_reader_of_decisions_sees_all_kinds():
    code = "a == 'x'\nb in ('y', 'z')\nmatch c:\n    case 'u' | 'v': pass\n{'w': 1}[d]\ne('not', n='no')"
    assert names_decided_by(ast.parse(code)) == set("xyzuvw")


def test_every_file_says_what_it_is():
    assert not [path for path in LIBRARY if tree(path).body and not ast.get_docstring(tree(path))]


def test_no_test_folder_hides_a_framework():
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not folders & FRAMEWORKS
