# Sourced by the other scripts: messages, the virtual environment, system packages.
# Settings (environment): VENV, PYTHON, HVD_ASYNC_CACHE, TF_ENABLE_ONEDNN_OPTS.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
CACHE=${HVD_ASYNC_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd_async}
# TensorFlow leaves oneDNN off on x86 CPUs without AVX-512 or AMX, where ResNet-50 is several times slower without it.
export TF_ENABLE_ONEDNN_OPTS=${TF_ENABLE_ONEDNN_OPTS:-1}
TORCH_PIN=2.13.0 TORCHVISION_PIN=0.28.0 TENSORFLOW_PIN=2.21.0

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# need_packages COMMAND:DEBIAN_PACKAGE... installs what is missing where it may, else says what to install.
need_packages() {
  local pair missing=()
  for pair in "$@"; do command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}"); done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "Installing system packages: ${missing[*]}"
    local log; log=$(mktemp "${TMPDIR:-/tmp}/hvd_async-apt.XXXXXX")
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
      >"$log" 2>&1 || die "apt-get could not install ${missing[*]}; see $log"
    rm -f "$log"
  else
    die "missing system packages: ${missing[*]}. Install them (Debian/Ubuntu: sudo apt-get install ${missing[*]}) and run this again."
  fi
}

# ensure_environment: .venv with both frameworks, this package with its development tools, and Horovod.
ensure_environment() {
  local python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
    || die "$python is not 3.10 to 3.13, which TensorFlow has wheels for; name another with PYTHON=..."
  if [ ! -x "$VENV/bin/python" ]; then
    say "Creating the virtual environment ${VENV#"$ROOT"/}"
    "$python" -m venv "$VENV" || die "venv failed (Debian: apt-get install python3-venv)"
  fi
  local stamp=$VENV/.hvd_async-requirements
  local wanted; wanted="$TORCH_PIN $TORCHVISION_PIN $TENSORFLOW_PIN $(cksum <"$ROOT/setup.py")"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    local tensorflow=tensorflow-cpu
    command -v nvidia-smi >/dev/null && tensorflow=tensorflow
    say "Installing torch $TORCH_PIN, torchvision $TORCHVISION_PIN, $tensorflow $TENSORFLOW_PIN and the tools (about a minute)"
    "$VENV/bin/python" -m pip install -q "torch==$TORCH_PIN" "torchvision==$TORCHVISION_PIN" \
      "$tensorflow==$TENSORFLOW_PIN" setuptools wheel -e "$ROOT[dev]" || die "pip could not install the frameworks (above)"
    echo "$wanted" >"$stamp"
  fi
  bash "$ROOT/scripts/install_horovod.sh" --python "$VENV/bin/python"
}
