#!/usr/bin/env bash
# Experiments on one GPU, in ten minutes: prices, the host's floor, goals, ablations, traces, races, NCCL ranks, fp16.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<USAGE
usage: scripts/gpu_experiments.sh [--python PATH] [--only 1,2,...] [--quick] OUT

Measures on one GPU and writes results into OUT as they come; a table at the end says which goals are met. Every part has
a time limit, and one that fails does not stop the others. Needs no Horovod and no network. All limits together are 12
minutes; in two calls: --only 1,2,3,4, then --only 5,6,7,8 with the same OUT.

  1  prices of the virtual GPU, and its prediction by them      40 s
  2  the host's time of a step (32 pixels, batch 2)             50 s
  3  bf16 ResNet-50, images/s over plain torch's               170 s
  4  ablations, and arrival ahead of the device                100 s
  5  traces of plain, all, solo, sgp                            40 s
  6  torch's CUDA sanitizer, 10 steps a mode                    40 s
  7  two NCCL ranks on the GPU: collectives, tests, a death    120 s
  8  fp16 with GradScaler                                       40 s

  --python PATH  an interpreter with a CUDA build of torch, and what hvd_async and its tests need (default: python3)
  --only A,B     these parts (default: all; 1 is compared with 3, so it predicts last)
  --quick        small runs, to see that the parts work, on a CPU too; judge nothing by them
USAGE
}

python=python3 only=1,2,3,4,5,6,7,8 quick='' out=''
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:?--python wants a path}; shift 2 ;;
    --only) only=${2:?--only wants numbers}; shift 2 ;;
    --quick) quick=yes; shift ;;
    -h|--help) usage; exit ;;
    -*) usage >&2; die "unknown option: $1" ;;
    *) out=$1; shift ;;
  esac
done
[ -n "$out" ] || { usage >&2; die "name a folder for the results"; }
mkdir -p "$out" || die "cannot make the folder $out"
out=$(realpath "$out")
cd "$ROOT" || exit 1
wanted() { [[ ",$only," == *",$1,"* ]]; }
gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') \
  || die "$python cannot import torch: name another interpreter with --python"
[ -n "$gpu" ] || [ -n "$quick" ] || die "$python has no torch that sees a GPU (--quick tries the parts without one)"
export HVD_ASYNC_TRANSPORT=torch PYTHONPATH=$ROOT OMP_NUM_THREADS=1
touch "$out/parts.jsonl"

# run NAME SECONDS COMMAND...: runs a command within a time limit, keeps its output, and notes how it has ended.
run() {
  local name=$1 limit=$2 begun=$SECONDS rc
  shift 2
  say "$name, at most $limit s"
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.txt" 2>&1
  rc=$?
  printf '{"name": "%s", "rc": %d, "seconds": %d}\n' "$name" "$rc" $((SECONDS - begun)) >>"$out/parts.jsonl"
  [ "$rc" -eq 0 ] || { echo "$name: exit code $rc; the end of $out/$name.txt:"; tail -n 5 "$out/$name.txt"; }
}

# skip NAME REASON: notes that a command is not run.
skip() {
  say "$1 is skipped: $2"
  printf '{"name": "%s", "skipped": "%s"}\n' "$1" "$2" >>"$out/parts.jsonl"
}

# bench NAME SECONDS REPETITIONS OPTION...: runs bench.py gpu, with the results of each block kept as they come.
bench() {
  local name=$1 limit=$2 repetitions=$3 minutes few=()
  shift 3
  if [ -z "$gpu" ]; then skip "$name" "no GPU"; return; fi
  [ -z "$quick" ] || few=(--quick)
  # the job ends by itself, with the repetitions that it has, 35 s after this many minutes: it starts, drains and judges
  minutes=$(printf '%d.%02d' $(((limit - 35) / 60)) $(((limit - 35) % 60 * 100 / 60)))
  run "$name" "$limit" "$python" scripts/bench.py gpu --repetitions "$repetitions" --limit "$minutes" --json "$out/$name.json" \
    --resume "$out/$name.blocks.jsonl" "$@" "${few[@]}"
}

# accepts ARGUMENT: whether EagerOptimizer has an argument.
accepts() {
  "$python" -c "import inspect, sys, hvd_async.torch as hvd; sys.exit('$1' not in inspect.signature(hvd.EagerOptimizer).parameters)"
}

modes=all,solo,sgp,adpsgd,lsgd
say "${gpu:-no GPU}; results go to $out"
wanted 1 && run prices 40 "$python" -m scripts.benchmarks.jobs.prices --json "$out/prices.json"
wanted 2 && bench floor 55 2 --no-profile --image-size 32 --batch-size 2 --steps 40 --arms "plain,$modes"
wanted 3 && bench goals 175 5 --no-profile --arms "plain,$modes"
if wanted 1; then
  if [ -f tests/conformance/virtual_gpu.py ]; then
    mapfile -t prices < <("$python" -c 'import json, sys
for name, value in json.load(open(sys.argv[1]))["prices"].items(): print(f"{name}={value}")' "$out/prices.json")
    few=()
    [ -z "$quick" ] || few=(all)
    run virtual 50 env CUDA_VISIBLE_DEVICES= "$python" -m tests.conformance.virtual_gpu "${few[@]}" --json "$out/virtual.json" \
      --price "${prices[@]}"
  else
    skip virtual "there is no tests/conformance/virtual_gpu.py"
  fi
fi
if wanted 4; then
  bench ablations 85 2 --no-profile --arms plain,all,all:confirm,all:check,all:disagree,plain:item,all:item
  if accepts arrival_lead; then
    bench leads 70 2 --no-profile --arms plain,solo,solo:lead=0,solo:lead=4,solo:lead=8,solo:lead=12
  else
    skip leads "EagerOptimizer has no arrival_lead"
  fi
fi
wanted 5 && bench traces 50 1 --steps 3 --arms plain,all,solo,sgp --traces "$out/traces"
wanted 6 && run sanitizer 40 "$python" -m scripts.benchmarks.jobs.sanitized --json "$out/sanitizer.json"
if wanted 7; then
  # NCCL takes each rank for a host of its own by its NCCL_HOSTID, so that ranks may share the GPU.
  export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0
  export NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_MAX_CTAS=4 NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_DEBUG=WARN
  backend=gloo
  [ -z "$gpu" ] || backend=nccl
  run nccl 25 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 scripts/nccl_ranks.py "$backend"
  run killed 40 "$python" -m scripts.benchmarks.jobs.killed --json "$out/killed.json"
  # (without the scripts' folder on the path: the tests' jobs have their own)
  if [ -z "$gpu" ]; then
    skip promises "no GPU"
  else
    run promises 70 env PYTHONPATH="$ROOT" HVD_ASYNC_TEST_DEVICE=cuda HVD_ASYNC_TEST_NCCL=1 HVD_ASYNC_TEST_PLANE=torch \
      "$python" -m pytest -q -x -p no:cacheprovider -k "torch and not mpi and (2 or uneven)" \
      tests/multiproc/test_equality.py tests/multiproc/test_promises.py
  fi
fi
wanted 8 && bench scaler 50 3 --no-profile --dtype fp16 --arms plain,all
"$python" -m scripts.benchmarks.cases.experiments "$out" | tee "$out/table.txt"
