#!/usr/bin/env bash
# The main job: TensorFlow's ResNet-50 on real images (scikit-learn's handwritten digits), trained by two horovodrun
# ranks with EagerOptimizer, one random rank held up in every step. Installs what is missing first.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: scripts/demo.sh [OPTION OF THE RUNNER ...]

Installs what is missing into .venv, then trains ResNet-50 on handwritten digits on 2 ranks with partial allreduce
while one random rank sleeps in every step, and says what the stragglers cost. It trains for 5 minutes, however fast the
machine is, plus a minute or two around that, plus about 5 minutes for the first installation. Options are passed on to
the runner, e.g.

  scripts/demo.sh --minutes 2                 a shorter run
  scripts/demo.sh --epochs 4                  so many epochs, however long they take
  scripts/demo.sh --quorum majority           another quorum
  scripts/demo.sh --inject none               without stragglers

Settings (environment): RANKS=2, FRAMEWORK=tf (or torch), RUNS=runs (where the summary, logs and checkpoints go),
TF_ENABLE_ONEDNN_OPTS=1 (0: without oneDNN, which is slower).
USAGE
}
case ${1:-} in -h|--help) usage; exit ;; esac

ranks=${RANKS:-2} framework=${FRAMEWORK:-tf} out=${RUNS:-$ROOT/runs}/demo
[ -f "$ROOT/${framework}_models/resnet50.py" ] || die "FRAMEWORK=$framework is not known: take tf or torch"
ensure_environment
mkdir -p "$out"
limit=(--minutes 5)
for option in "$@"; do
  case $option in --minutes*|--epochs*|--steps*|--resume) limit=() ;; esac
done
say "Training: $ranks ranks, ${framework}_models/resnet50.py (results in ${out#"$ROOT"/})"
TF_CPP_MIN_LOG_LEVEL=3 "$VENV/bin/horovodrun" -np "$ranks" --gloo \
  "$VENV/bin/python" "$ROOT/${framework}_models/resnet50.py" --algorithm eager --quorum solo --data digits \
  --model resnet50 --image-size 32 --batch-size 32 --epochs 24 --optimizer adam --lr 0.001 --warmup-epochs 2 --cosine \
  --bn-momentum 0.8 --eval-every 4 --inject random:1:0.2 --progress bar \
  --summary "$out/summary.json" --log-dir "$out/logs" --checkpoint-dir "$out/checkpoints" "${limit[@]}" "$@" 2>&1 \
  | "$VENV/bin/python" "$ROOT/scripts/plain_output.py"
say "Done. Summary: ${out#"$ROOT"/}/summary.json; pictures: $VENV/bin/tensorboard --logdir ${out#"$ROOT"/}/logs,
    or $VENV/bin/python scripts/plot.py ${out#"$ROOT"/}/logs --plot ${out#"$ROOT"/}/run.png"
