#!/usr/bin/env bash
# Installs the wheel into an empty virtual environment from a folder of wheels, and trains on two ranks under torchrun.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: scripts/try_install.sh [--wheels DIR]

Builds hvd_async's wheel, fetches what `pip install hvd_async[torch]` needs into DIR (a temporary folder if it is not
given), and then measures without a network, from the creation of an empty virtual environment on: how long it takes
until hvd_async is installed, and until two ranks of torchrun have averaged their first step. Horovod, TensorFlow and a
compiler are not needed.

Settings (environment): PYTHON=python3, LIMIT=90 (seconds until the first step; 0: any), TORCH (the version to install;
by default the one that the project is tested with. A build for CUDA is ten times as large as one for CPUs).
USAGE
}
wheels=
while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) usage; exit ;;
    --wheels) wheels=$(mkdir -p "$2" && cd "$2" && pwd); shift 2 ;;
    *) usage >&2; exit 2 ;;
  esac
done

python=${PYTHON:-python3} limit=${LIMIT:-90}
work=$(mktemp -d "${TMPDIR:-/tmp}/hvd_async-install.XXXXXX")
trap 'rm -rf "$work"' EXIT
wheels=${wheels:-$work/wheels}
say "Building the wheel, and fetching what it needs"
cp -r "$ROOT/hvd_async" "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT/README.md" "$ROOT/LICENSE" "$work"
"$python" -m venv "$work/tools"
rm -f "$wheels"/hvd_async-*.whl
"$work/tools/bin/pip" wheel -q --no-deps --wheel-dir "$wheels" "$work" || die "the wheel could not be built"
"$work/tools/bin/pip" download -q --dest "$wheels" "$(echo "$wheels"/hvd_async-*.whl)[torch]" \
  "torch==${TORCH:-$TORCH_PIN}" \
  || die "pip could not fetch what the wheel needs"

seconds() { "$python" -c 'import sys, time; print(f"{time.time() - float(sys.argv[1]):.1f}")' "$1"; }
say "Installing it into an empty environment, without a network"
started=$("$python" -c 'import time; print(time.time())')
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-index --find-links "$wheels" 'hvd_async[torch]'
installed=$(seconds "$started")
cd "$work/tools"  # (nothing of the checkout can be imported from here)
env -u PYTHONPATH OMP_NUM_THREADS=1 "$work/venv/bin/torchrun" --standalone --nproc-per-node 2 \
  "$ROOT/docs/examples/torchrun/quickstart.py" | while IFS= read -r line; do
    case $line in "first step"*) seconds "$started" >"$work/first" ;; esac
    echo "$line"
  done
[ -s "$work/first" ] || die "no step was made"
first=$(cat "$work/first")
say "Installed after $installed s, first averaged step after $first s"
"$python" -c 'import sys; sys.exit(float(sys.argv[2]) > 0 and float(sys.argv[1]) > float(sys.argv[2]))' "$first" "$limit" \
  || die "the first step is to come within $limit s"
