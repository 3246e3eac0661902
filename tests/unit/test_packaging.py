"""The files of a release: they are made without a network, hold what they should, and work outside of the checkout."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import hvd_async
from tests.conftest import LONG_RUN

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = ("hvd_async", "docs", "scripts", "tests", "torch_models", "tf_models")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("build", "wheel")),
    reason="what makes the files of a release is not installed: pip install build wheel",
)


def run(*command, cwd):
    """The output of a command that must succeed, which does not see the checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    settings = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder with the source distribution and the wheel that is made of it; of a copy, where setuptools may write."""
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith(".git"):
            shutil.copy(path, source)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(release):
    (path,) = release.glob("*.whl")
    return path


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    packed = re.search(r'^    version="(.+)",$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited[1] == packed[1] == hvd_async.__version__


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    library = {str(path.relative_to(ROOT)) for path in (ROOT / "hvd_async").rglob("*.py")}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == library | {"hvd_async/py.typed"}
    assert wheel.name == f"hvd_async-{hvd_async.__version__}-py3-none-any.whl"
    assert [name for name in names if name.endswith("LICENSE")]


def test_the_wheel_says_what_it_is(wheel):
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    assert (found.name, found.metadata["Requires-Python"]) == ("hvd_async", ">=3.10")
    assert {"torch", "tensorflow", "horovod", "runners", "docs", "dev"} <= {*found.metadata.get_all("Provides-Extra")}
    needs = [need for need in found.requires if "extra ==" not in need]
    assert needs == ["msgspec", "numpy", "prometheus_client", "psutil", "pyzmq"]
    torch = [need for need in found.requires if re.search("extra == .torch.$", need)]
    assert [re.match(r"\w+", need)[0] for need in torch] == ["torch"], "no Horovod, no compiler"


def test_the_source_distribution_is_the_whole_project(release):
    (path,) = release.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in COPIED:
        files = {path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {str(path.relative_to(ROOT)) for path in files} <= names
    assert {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "mkdocs.yml"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_it_works_elsewhere(wheel, tmp_path):
    """In a fresh environment that holds the wheel and nothing else, not its dependencies either."""
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python, command = (tmp_path / "venv" / "bin" / name for name in ("python", "hvd_async"))
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    code = "import hvd_async, pathlib; print(hvd_async.__version__, pathlib.Path(hvd_async.__file__).parent)"
    version, folder = run(str(python), "-c", code, cwd=tmp_path).split()
    assert version == hvd_async.__version__
    assert tmp_path in pathlib.Path(folder).parents
    assert (pathlib.Path(folder) / "py.typed").is_file()
    by_name = run(str(command), "--help", cwd=tmp_path)
    assert by_name.startswith("usage: hvd_async")
    assert run(str(python), "-m", "hvd_async", "--help", cwd=tmp_path) == by_name


@pytest.mark.skipif(not LONG_RUN, reason="what a service reads is checked in a long run: HVD_ASYNC_TEST_LONG=1")
@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("github-workflows", "workflows/checks.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/error.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_what_the_service_reads_has_its_schema(schema, file):
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", f".github/{file}", cwd=ROOT)
