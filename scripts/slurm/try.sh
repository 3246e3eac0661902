#!/usr/bin/env bash
# Tries train.sbatch on a SLURM of its own: real daemons, two nodes that are network namespaces of this machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
case ${1:-} in
  -h|--help)
    echo "usage: scripts/slurm/try.sh [PYTEST ARGUMENT ...]"
    echo "Needs root and Debian's slurm-wlm, munge, iproute2, and skips in words without them. About 5 minutes."
    echo "scripts/slurm/cluster.py -- COMMAND runs a command beside such a SLURM: a shell, sbatch."
    exit ;;
esac
cd "$ROOT"
[ -x "$VENV/bin/python" ] || die "there is no $VENV: run scripts/test.sh, which makes it, or say where with VENV=/path"
TF_CPP_MIN_LOG_LEVEL=3 exec "$VENV/bin/python" -m pytest scripts/slurm/try_slurm.py "$@"
