#!/usr/bin/env bash
# Installs what is missing (both frameworks, Horovod, the tools) into .venv, then runs all checks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${1:-} in
  -h|--help)
    echo "usage: scripts/test.sh [--fast] [PYTEST ARGUMENT ...]"
    echo "Installs what is missing into .venv, then runs ruff, mypy and all tests (--fast: without horovodrun jobs)."
    exit ;;
esac
ensure_environment
bash "$ROOT/scripts/check.sh" "$@"
