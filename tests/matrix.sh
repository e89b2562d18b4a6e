#!/usr/bin/env bash
# Runs a command, such as pytest, as on another machine, in a private mount namespace. Requires root.
# Usage: tests/matrix.sh processor|user COMMAND...
#   processor: without AVX-512, or with its flags on a processor that lacks it (only slow tests use its instructions)
#   user: as a user who is not root, has no entry in /etc/passwd, and may only read the checkout; one core, TMPDIR in
#     memory, TZ=Asia/Kolkata, LC_ALL=C, umask 077
set -euo pipefail
user=(setpriv --reuid 54321 --regid 54321 --clear-groups)

# MXNet's oneDNN reads the processor itself, so it obeys only the variable. Its limit equals the level of the processor
# in /proc/cpuinfo, so nothing else shows it.
as_other_processor() {
    if grep -qm 1 '^flags.* avx512f' /proc/cpuinfo; then
        sed -E '/^flags/s/ (avx512|amx)[a-z0-9_]*//g' /proc/cpuinfo >"$scratch/cpuinfo"
        export DNNL_MAX_CPU_ISA=AVX2
    else
        sed '/^flags/s/$/ avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16/' /proc/cpuinfo >"$scratch/cpuinfo"
    fi
    mount --bind "$scratch/cpuinfo" /proc/cpuinfo
}
# Lets the user enter the folders above a path, such as /root.
open_way_to() { # PATH
    local folder upper
    folder=$(dirname -- "$1")
    [ "$folder" != / ] || return 0
    open_way_to "$folder"
    if ! "${user[@]}" test -x "$folder"; then
        upper=$(mktemp -d -p "$scratch")
        mkdir "$upper/files" "$upper/work"
        mount -t overlay -o "lowerdir=$folder,upperdir=$upper/files,workdir=$upper/work" overlay "$folder"
        chmod o+x "$folder"
    fi
}
as_user() {
    open_way_to "$PWD"
    open_way_to "$(readlink -f .venv/bin/python)"
    mount --bind "$PWD" "$PWD"
    mount -o remount,bind,ro "$PWD"
    cd "$PWD" # enters the new mount
    install -d -o 54321 "$scratch/home" "$scratch/tmp"
    export HOME=$scratch/home TMPDIR=$scratch/tmp TZ=Asia/Kolkata LC_ALL=C
    unset MLPERF_RN50_NEED_ALL MLPERF_RN50_PEAKS # some tests need root, and the file of peaks belongs to root
    umask 077
    prefix=("${user[@]}" taskset --cpu-list "$(taskset --cpu-list --pid $$ | sed -E 's/.*: ([0-9]+).*/\1/')")
}

if [ "${1:-}" != --in-namespace ]; then
    [ "$(id -u)" = 0 ] || { echo 'tests/matrix.sh: requires root, for a mount namespace' >&2; exit 2; }
    scratch=$(mktemp -d -p /tmp) # the user can reach it
    trap 'rm -rf "$scratch"' EXIT
    unshare --mount --propagation private "${BASH_SOURCE[0]}" --in-namespace "$scratch" "$@"
    exit
fi
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
scratch=$2 situation=$3 prefix=()
shift 3
mount -t tmpfs -o mode=755 tmpfs "$scratch"
case $situation in
    processor) as_other_processor ;;
    user) as_user ;;
    *) echo "tests/matrix.sh: got $situation, expected processor or user" >&2; exit 2 ;;
esac
exec "${prefix[@]}" "$@"
