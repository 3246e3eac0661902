#!/usr/bin/env bash
# Builds Horovod for the torch and/or TensorFlow that a Python environment holds, and installs it there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

HOROVOD=0.28.1
usage() {
  cat <<USAGE
usage: scripts/install_horovod.sh [--python PATH] [--cache DIR] [--from DIR] [--without-mpi] [--without-gpu]
                                  [--rebuild] [--wheel DIR]

Builds Horovod $HOROVOD against the torch and/or TensorFlow installed for PATH, with Gloo, with MPI, and with
NCCL where a CUDA toolkit, NCCL's header and a CUDA build of a framework are found. The wheel is kept in DIR,
so that it is built once for each (Horovod, torch, TensorFlow, Python, flags).

  --python PATH    the environment's interpreter (default: .venv/bin/python, else python3)
  --cache DIR      where wheels are kept (default: $CACHE/wheels)
  --from DIR       no network: take Horovod's source distribution, and wheels that are missing, from DIR
                   (pip download --no-deps --no-binary horovod -d DIR horovod==$HOROVOD, where there is one)
  --without-mpi    build with Gloo only
  --without-gpu    build without CUDA and NCCL, whatever is found (TensorFlow's usual wheel is a CUDA build)
  --rebuild        build even if the cache has the wheel
  --wheel DIR      do not install Horovod: put the wheel into DIR, for machines with the same Python, frameworks and
                   libraries, where \`pip install --no-deps DIR/horovod-*.whl\` installs it
USAGE
}

python= wheels=$CACHE/wheels mpi=1 gpu=1 rebuild= index=() into=
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=${2:?--python wants a path}; shift 2 ;;
    --cache) wheels=${2:?--cache wants a folder}; shift 2 ;;
    --from) index=(--no-index --find-links "$(realpath "${2:?--from wants a folder}")"); shift 2 ;;
    --without-mpi) mpi=; shift ;;
    --without-gpu) gpu=; shift ;;
    --rebuild) rebuild=1; shift ;;
    --wheel) into=$(realpath -m "${2:?--wheel wants a folder}"); shift 2 ;;
    -h|--help) usage; exit ;;
    *) usage >&2; die "unknown option: $1" ;;
  esac
done
if [ -z "$python" ]; then python=$VENV/bin/python; [ -x "$python" ] || python=python3; fi
py() { TF_CPP_MIN_LOG_LEVEL=3 "$python" "$@"; }

# -- 1. what is there ---------------------------------------------------------------------------------------
version_of() { py -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || true; }
torch=$(version_of torch)
tensorflow=$(version_of tensorflow)
for flavour in tensorflow-cpu tensorflow-gpu; do [ -n "$tensorflow" ] || tensorflow=$(version_of $flavour); done
[ -n "$torch$tensorflow" ] || die "$python has neither torch nor tensorflow: pip install one of them first"

nccl=
cuda=${CUDA_HOME:-/usr/local/cuda}
if [ ! -x "$cuda/bin/nvcc" ] && command -v nvcc >/dev/null; then
  cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
fi
if [ -z "$gpu" ]; then
  cuda_note="without GPUs, as asked: no NCCL"
elif [ -x "$cuda/bin/nvcc" ]; then
  cuda_framework=
  if [ -n "$torch" ] && py -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then cuda_framework=torch; fi
  if [ -n "$tensorflow" ] && py -c 'import sys, tensorflow as tf; sys.exit(not tf.test.is_built_with_cuda())' 2>/dev/null; then
    cuda_framework=tensorflow
  fi
  header=$(py -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null || true)
  if [ -z "$cuda_framework" ]; then
    cuda_note="CUDA toolkit found, but the frameworks are CPU builds: no NCCL"
  elif [ -n "$header" ] && [ -f "$header/include/nccl.h" ]; then
    nccl=$header cuda_note="CUDA with NCCL from the nvidia-nccl wheel (--without-gpu leaves them out)"
  elif [ -f /usr/include/nccl.h ] || [ -f "$cuda/include/nccl.h" ]; then
    nccl=system cuda_note="CUDA with the system's NCCL (--without-gpu leaves them out)"
  else
    cuda_note="CUDA toolkit found but not nccl.h (libnccl-dev, or pip's nvidia-nccl): no NCCL"
  fi
else
  cuda_note="no CUDA toolkit: no NCCL"
fi
say "Horovod $HOROVOD for Python $(py -V | cut -d' ' -f2), torch ${torch:-none}, TensorFlow ${tensorflow:-none}; Gloo${mpi:+, MPI}; $cuda_note"

# -- 2. already there? --------------------------------------------------------------------------------------
tag=$(py -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
capability=  # for the GPUs that are here, else for all that the toolkit knows
if [ -n "$nccl" ]; then
  capability=$(py -c 'import torch; print(*sorted({"%d%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}), sep=",")' 2>/dev/null || true)
  release=$("$cuda/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
fi
key="horovod-$HOROVOD-p7-$tag-$(uname -m)-torch_${torch:-none}-tensorflow_${tensorflow:-none}-gloo${mpi:+-mpi}${nccl:+-nccl-cuda_$release-sm_${capability:-all}}"
stamp=$(py -c 'import sys; print(sys.prefix)')/.hvd_async-horovod
if [ -z "$rebuild$into" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ "$(version_of horovod)" = "$HOROVOD" ]; then
  say "Horovod is installed already"; exit
fi
if [ -n "$mpi" ]; then need_packages mpirun:openmpi-bin mpicxx:libopenmpi-dev; fi

# -- 3. build -----------------------------------------------------------------------------------------------
mkdir -p "$wheels/$key"
wheel=$(find "$wheels/$key" -name '*.whl' | head -n 1)
if [ -z "$wheel" ] || [ -n "$rebuild" ]; then
  need_packages g++:g++ make:make cmake:cmake tar:tar
  work=$(mktemp -d "${TMPDIR:-/tmp}/hvd_async-horovod.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  say "Fetching Horovod's source"
  py -m pip install -q "${index[@]}" setuptools wheel packaging pyyaml psutil cloudpickle cffi \
    || die "pip could not install the build tools"
  py -m pip download -q "${index[@]}" --no-binary horovod --no-deps --no-build-isolation -d "$work" "horovod==$HOROVOD" \
    || die "pip could not fetch horovod==$HOROVOD"
  tar xzf "$work/horovod-$HOROVOD.tar.gz" -C "$work"
  src=$work/horovod-$HOROVOD
  # Today's torch and TensorFlow headers want C++17; TensorFlow's no longer have what the XLA ops include.
  sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$src/CMakeLists.txt" "$src/horovod/torch/CMakeLists.txt"
  sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' "$src/horovod/common/ops/cuda/CMakeLists.txt"
  sed -i '/xla_mpi_ops\.cc/d' "$src/horovod/tensorflow/CMakeLists.txt"
  # Drivers come with libcuda.so.1; libcuda.so is the toolkit's, if there is one.
  sed -i 's/"libcuda\.so"/"libcuda.so.1"/' "$src/horovod/torch/cuda_util.cc"
  # Gloo's alltoallv asks for a peer's message after it has begun to send it its own, over the same connection: the
  # question waits behind all of that, and two ranks that exchange messages take turns. Here it asks first.
  alltoallv=$src/third_party/gloo/gloo/alltoallv.cc
  sed -i -e '/^    in->send($/,/;$/d' -e '/^    in->waitSend(/i\
    int sendRank = (myRank + i) % worldSize;\
    in->send(sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);\
  }\
\
  for (int i = 1; i < worldSize; i++) {' "$alltoallv"
  [ "$(grep -c 'for (int i = 1; i < worldSize; i++)' "$alltoallv")" = 3 ] || die "Gloo's alltoallv is not as expected"
  # In elastic jobs: when a rank gives up, its process sets keep Gloo's connections until it has met the others again, for
  # whom these look alive: they wait in their last operation until Gloo's limit of 30 s. Here they are closed. Operations
  # have a limit of their own; that of meeting has to bear how long a new rank takes to begin.
  gloo_context=$src/horovod/common/gloo/gloo_context.cc operations=$src/horovod/common/operations.cc
  limit='std::chrono::seconds(GetIntEnvOrDefault("HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS", timeout.count() / 1000))'
  sed -i -e 's/^  global_ctx = global_context\.ctx;$/&\n  enabled_ = std::getenv("HOROVOD_ELASTIC") != nullptr;/' \
    -e "s|^  store->Finalize();\$|&\n  context->setTimeout($limit);|" \
    -e 's/^      std::ostringstream out;$/      SetEnv(HOROVOD_RANK, "-1");\n&/' "$gloo_context"
  # A rank that dies while the others meet would end these too: they abort. Here init() fails, and can be called again.
  failed='catch (const std::exception\& ex) {\n      LOG(ERROR) << "Horovod: " << ex.what();\n      state.process_set_table.Get(0).gloo_context.Finalize();\n      global_gloo_context.Finalize();\n      state.initialization_failed = true;\n      return;\n    }'
  sed -i -e "s/^    global_gloo_context\.Initialize(ParseGlooIface());\$/    try {\n  &\n    } $failed/" \
    -e "s/^    state\.process_set_table\.Initialize(global_gloo_context);\$/    try {\n  &\n    } $failed/" \
    -e '/^    \/\/ Reset initialization flag$/a\    horovod_global.initialization_failed = false;' "$operations"
  [ "$(grep -cE 'enabled_ = std::getenv|OPERATION_TIMEOUT|SetEnv\(HOROVOD_RANK, "-1"' "$gloo_context")" = 3 ] \
    && [ "$(grep -cE 'LOG\(ERROR\) << "Horovod: "|^    horovod_global.initialization_failed = false' "$operations")" = 3 ] \
    || die "Horovod's gloo_context.cc and operations.cc are not as expected"
  # Gloo tells nobody who waits for a message that is half sent or half received that its connection has ended.
  pair=$src/third_party/gloo/gloo/transport/tcp/pair.cc
  sed -i -e '/Loop through posted send operations/,/Loop through pending send/ s/^    if (op.buf != nullptr) {$/    NonOwningPtr<UnboundBuffer> ubuf(op.ubuf);\
    if (ubuf) {\
      ubuf->signalException(ex);\
    }\
&/' -e 's|^  // Loop through posted send operations.$|  NonOwningPtr<UnboundBuffer> half(rx_.ubuf);\
  if (half) {\
    half->signalException(ex);\
  }\
&|' "$pair"
  [ "$(grep -cE 'half->signalException|ubuf->signalException' "$pair")" = 2 ] || die "Gloo's pair.cc is not as expected"
  # Gloo waits five times as long as its limit for a peer to connect, 150 s, also for one that has died meanwhile.
  connect=$src/third_party/gloo/gloo/transport/tcp/pair.h
  sed -i -e 's/timeout_ \* 5,/timeout_ * (std::getenv("HOROVOD_ELASTIC") ? 1 : 5),/' \
    -e '0,/^#include </s//#include <cstdlib>\n&/' "$connect"
  [ "$(grep -cE '^#include <cstdlib>|std::getenv\("HOROVOD_ELASTIC"\) \? 1 : 5' "$connect")" = 2 ] \
    || die "Gloo's pair.h is not as expected"
  # ssh does not notice for hours that an elastic job's host has vanished, and until then horovodrun waits for its ranks.
  gloo_run=$src/horovod/runner/gloo_run.py
  alive='-o ServerAliveInterval=2 -o ServerAliveCountMax=3'
  sed -i "/^        if settings\.verbose:\$/i\\
        if settings.elastic and command.startswith('ssh '):\\
            command = command.replace('ssh', 'ssh $alive', 1)\\
" "$gloo_run"
  [ "$(grep -c ServerAliveInterval "$gloo_run")" = 1 ] || die "Horovod's gloo_run.py is not as expected"
  # horovodrun tells rank 0 of hosts that have come or gone, and holds a lock meanwhile that it needs to give ranks their
  # new numbers: where rank 0's own host has vanished that takes minutes. Here a thread of its own tells it.
  driver=$src/horovod/runner/elastic/driver.py
  sed -i 's/^\( *\)self\.\(_notify_workers_host_changes\)(\(self._host_manager.current_hosts, update_res\))$/\1threading.Thread(target=self.\2, args=(\3), daemon=True).start()/' "$driver"
  # Hosts that were found after it had looked at them to number the ranks anew, and before the new rank 0 was known, were
  # told to the old one alone, which may be dead: the job never heard of them. Here it looks again.
  again='threading.Thread(target=self._notify_workers_host_changes, args=(self._host_manager.current_hosts, HostUpdateResult.mixed), daemon=True).start()'
  sed -i "s/^        self\._start_worker_processes(pending_slots)\$/&\n        $again/" "$driver"
  [ "$(grep -c 'Thread(target=self._notify_workers_host_changes' "$driver")" = 2 ] || die "Horovod's driver.py is not as expected"
  # torch's functions keep Python's lock while they wait for Horovod's, and Horovod's thread its own while it waits for
  # Python's, to let go of tensors when it ends after an error: the process stands still for ever.
  ops=$src/horovod/torch/mpi_ops_v2.cc
  sed -i 's/&\(Do[A-Za-z]*\));$/\&\1, py::call_guard<py::gil_scoped_release>());/' "$ops"
  [ "$(grep -c 'Do.*call_guard<py::gil_scoped_release>' "$ops")" -gt 100 ] || die "Horovod's mpi_ops_v2.cc is not as expected"
  flag() { [ -n "$1" ] && echo "HOROVOD_WITH_$2=1" || echo "HOROVOD_WITHOUT_$2=1"; }
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # (which obeys these)
  settings=("$(flag "$torch" PYTORCH)" "$(flag "$tensorflow" TENSORFLOW)" "$(flag "$mpi" MPI)"
            HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 "HOROVOD_CMAKE=$(command -v cmake)" "MAKEFLAGS=${MAKEFLAGS:--j$cores}")
  # What Horovod's headers use and do not include: up to g++ 12 other headers bring it along.
  included="-include cstdint -include stdexcept -include string"
  settings+=("CXXFLAGS=$included ${CXXFLAGS:-}" "CUDAFLAGS=$included ${CUDAFLAGS:-}")
  if [ -n "$nccl" ]; then
    settings+=(HOROVOD_GPU_OPERATIONS=NCCL "HOROVOD_CUDA_HOME=$cuda" "PATH=$cuda/bin:$PATH")
    # The wheel's library has its version in its name, by which no linker looks. (Where another environment takes this
    # wheel from the cache, torch has loaded its own NCCL before.)
    if [ "$nccl" != system ]; then
      mkdir -p "$work/nccl/lib"
      ln -s "$nccl/include" "$work/nccl/include"
      ln -s "$nccl"/lib/libnccl.so.* "$work/nccl/lib/libnccl.so"
      settings+=("HOROVOD_NCCL_HOME=$work/nccl" HOROVOD_NCCL_LINK=SHARED "LDFLAGS=-Wl,-rpath,$nccl/lib ${LDFLAGS:-}")
    fi
    [ -z "$capability" ] || settings+=("HOROVOD_BUILD_CUDA_CC_LIST=$capability")
  fi
  log=$wheels/$key.log
  say "Compiling on $cores cores (about 5 CPU minutes; log: $log)"
  (cd "$src" && env "${settings[@]}" TF_CPP_MIN_LOG_LEVEL=3 "$python" -m pip wheel -v --no-build-isolation --no-deps -w "$wheels/$key" .) >"$log" 2>&1 || {
    grep -m 20 -nE 'error:|Error|fatal' "$log" >&2 || true
    die "Horovod did not build. The first errors are above, the whole log is $log. The usual causes: a missing
       compiler or header (apt-get install g++ make cmake python3-dev libopenmpi-dev), or less than 4 GiB of memory
       (set MAKEFLAGS=-j1)."
  }
  wheel=$(find "$wheels/$key" -name '*.whl' | head -n 1)
else
  say "Using the wheel built before: $wheel"
fi

# -- 4. hand over, or install and check ---------------------------------------------------------------------
if [ -n "$into" ]; then
  mkdir -p "$into"
  cp "$wheel" "$into/"
  echo "$key" >"$into/$(basename "$wheel" .whl).txt"  # (a wheel's name does not tell the frameworks)
  say "The wheel is $into/$(basename "$wheel"); what it was built for is in the .txt beside it"
  exit
fi
py -m pip install -q --force-reinstall --no-deps "$wheel"
py -m pip install -q "${index[@]}" pyyaml psutil cloudpickle cffi packaging
for module in ${torch:+horovod.torch} ${tensorflow:+horovod.tensorflow}; do
  py -c "import $module" || die "$module was built but does not import; run this again with --rebuild"
done
echo "$key" >"$stamp"
say "Horovod $HOROVOD is installed, for${torch:+ torch}${tensorflow:+ TensorFlow}, with Gloo${mpi:+, MPI}${nccl:+, NCCL}"
