#!/usr/bin/env bash
# On a machine with a GPU: builds Horovod with NCCL, runs the tests on CUDA tensors, measures ResNet-50.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<USAGE
usage: scripts/gpu_check.sh [--python PATH] [--from DIR] [--out DIR] [--only build,test,nccl,bench] [--limit MIN]

Builds Horovod with NCCL for a torch that has CUDA, runs the tests that have tensors on GPUs (1 rank on NCCL; 4 ranks that
share a GPU, by way of the CPU; 2 to 4 ranks that share it on NCCL, which takes each for a host of its own), then measures
ResNet-50: images a second of plain torch, Horovod's optimizer and ours, and what of their steps waits for the device.
Needs one GPU, and for the build nvcc and a C++ compiler.

  --python PATH  an interpreter with a CUDA build of torch (default: python3); what is missing goes into .venv-gpu,
                 which sees PATH's packages
  --from DIR     no network: take Horovod's source distribution, and wheels that are missing, from DIR
  --out DIR      where figures, pictures and traces go (default: gpu-results)
  --only A,B     these parts of build, test, nccl, bench (default: all)
  --limit MIN    measure for so many minutes at the most, in each of three settings (default: 4)
USAGE
}

python=python3 from=() index=() out=gpu-results only=build,test,nccl,bench limit=4
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:?--python wants a path}; shift 2 ;;
    --from) folder=$(realpath "${2:?--from wants a folder}")
            from=(--from "$folder") index=(--no-index --find-links "$folder"); shift 2 ;;
    --out) out=${2:?--out wants a folder}; shift 2 ;;
    --only) only=${2:?--only wants parts}; shift 2 ;;
    --limit) limit=${2:?--limit wants minutes}; shift 2 ;;
    -h|--help) usage; exit ;;
    *) usage >&2; die "unknown option: $1" ;;
  esac
done
wanted() { [[ ",$only," == *",$1,"* ]]; }
cd "$ROOT"
command -v nvidia-smi >/dev/null || die "there is no nvidia-smi here: this needs a machine with a GPU"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
  || die "$python has no torch that sees a GPU: name one with --python"
VENV=$ROOT/.venv-gpu
mkdir -p "$out"

if wanted build; then
  say "GPUs: $(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs)"
  # (some systems' Python cannot give an environment a pip of its own: then PATH's packages must have one, see below)
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV" >/dev/null || "$python" -m venv --clear --without-pip "$VENV" \
    || die "venv failed (Debian: apt-get install python3-venv)"
  # (--system-site-packages would mean those of the interpreter that PATH's own environment was made from)
  "$python" -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' \
    >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_python.pth"
  say "Installing this package and what its tests need"
  "$VENV/bin/python" -m pip install -q "${index[@]}" --no-build-isolation -e . pytest pytest-timeout hypothesis networkx psutil \
    scikit-learn matplotlib || die "pip could not install them (above)"
  bash scripts/install_horovod.sh --python "$VENV/bin/python" --without-mpi "${from[@]}"
fi
export PATH=$VENV/bin:$PATH
failed=
checks() { python -m pytest -q -p no:cacheprovider "$@" | tee -a "$out/tests.txt" || failed=1; }
if wanted test || wanted nccl; then : >"$out/tests.txt"; fi
several() { HVD_ASYNC_TEST_DEVICE=cuda checks -k "torch and not mpi" tests/multiproc/test_{equality,gossip,leaders,promises}.py; }
if wanted test; then
  say "Tests on GPUs"
  checks -m gpu tests/unit/test_torch_streams.py
  several
fi
if wanted nccl; then
  # Each rank sets an NCCL_HOSTID of its own, so NCCL takes it for a host of its own, does not see that ranks share a GPU,
  # and uses sockets. The ranks take turns on the GPU: this checks results, not speed.
  say "Several NCCL ranks on one GPU"
  (
    export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0
    export NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_MAX_CTAS=4 NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_DEBUG=WARN
    for ranks in 2 3; do
      timeout 120 python -m torch.distributed.run --standalone --nproc-per-node "$ranks" scripts/nccl_ranks.py nccl \
        | tee -a "$out/tests.txt" || exit 1
    done
    HVD_ASYNC_TEST_NCCL=1 several
    HVD_ASYNC_TEST_NCCL=1 HVD_ASYNC_TEST_PLANE=torch several
    [ -z "$failed" ]
  ) || failed=1
fi
if wanted bench; then
  for dtype in bf16 fp16; do
    say "ResNet-50 at 224 x 224, batch 128, $dtype"
    python scripts/bench.py gpu --limit "$limit" --dtype "$dtype" --json "$out/$dtype.json" --plot "$out/$dtype.png" --traces "$out/traces-$dtype" \
      | tee "$out/$dtype.txt"
  done
  say "The same over Horovod, where it calls a collective done when it is queued"
  HVD_ASYNC_TRANSPORT=horovod HOROVOD_ENABLE_ASYNC_COMPLETION=1 python scripts/bench.py gpu --limit "$limit" --arms plain,horovod,all,solo --json "$out/async.json" \
    --plot "$out/async.png" | tee "$out/async.txt"
fi
[ -z "$failed" ] || die "tests failed (above, and in $out/tests.txt)"
say "Done: $out"
