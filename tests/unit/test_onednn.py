"""TensorFlow's oneDNN is on wherever the project starts TensorFlow, unless the user has said otherwise."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
STANDS_FOR_KERAS = f"import os\nprint(os.environ.get({VARIABLE!r}))\nraise SystemExit\n"


def said(tmp_path, command, chosen):
    """What a command prints in which the user has chosen so, or nothing."""
    (tmp_path / "keras.py").write_text(STANDS_FOR_KERAS)
    (tmp_path / "tensorflow.py").write_text(STANDS_FOR_KERAS)
    own = {name: value for name, value in os.environ.items() if name != VARIABLE}
    own |= {"PYTHONPATH": str(tmp_path)} | ({} if chosen is None else {VARIABLE: chosen})
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=60, check=True).stdout.split()


@pytest.mark.parametrize(("chosen", "expected"), [(None, "1"), ("0", "0")])
@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, str(ROOT / "tf_models" / "resnet50.py")],
        ["bash", "-c", f"source {ROOT / 'scripts' / 'common.sh'}; {sys.executable} -c 'import keras'"],
    ],
    ids=["runner", "scripts"],
)
def test_onednn_is_on_before_tensorflow_is_imported(tmp_path, command, chosen, expected):
    assert said(tmp_path, command, chosen) == [expected]


def test_onednn_is_on_in_tests():
    assert os.environ.get(VARIABLE) is not None
