#!/usr/bin/env bash
# All checks in the environment that is there: ruff, mypy, then the tests. Ends with pytest's summary line.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: scripts/check.sh [--fast | --long] [PYTEST ARGUMENT ...]

Runs ruff, mypy and pytest with the Python of .venv. --fast leaves out the tests that start horovodrun jobs. --long adds
what is too long for every day (HVD_ASYNC_TEST_LONG=1): larger explorations of the state machines, four times as many
random examples, and others each time.
Tests run in three processes, which keep two cores busy. Those that start jobs come first, in two lanes, as they often
wait; all others are nice to them. `-n 0` runs all in one process, in order.
USAGE
}
fast=
case ${1:-} in
  -h|--help) usage; exit ;;
  --fast) fast=1; shift ;;
  --long) export HVD_ASYNC_TEST_LONG=1; shift ;;
esac
cd "$ROOT"
[ -x "$VENV/bin/python" ] || die "there is no $VENV: run scripts/test.sh, which makes it"
say "ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check -q . || die "ruff format would change files: run $VENV/bin/ruff format ."
say "mypy"
"$VENV/bin/mypy"
say "pytest"
TF_CPP_MIN_LOG_LEVEL=3 "$VENV/bin/python" -m pytest -n 3 --dist loadscope --junitxml build/tests.xml ${fast:+-m "not multiproc"} "$@"
