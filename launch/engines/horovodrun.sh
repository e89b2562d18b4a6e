#!/usr/bin/env bash
# Starts a program on hosts with horovodrun over Gloo, and ends with the exit code of the ranks.
# Usage: launch/engines/horovodrun.sh HOST:RANKS[,HOST:RANKS...] PROGRAM [ARGUMENTS...]     localhost is this machine
set -euo pipefail
# Validate the ranks before shell arithmetic, which would evaluate other text as an expression.
[[ ${1:-} =~ ^[A-Za-z0-9._-]+:[1-9][0-9]*(,[A-Za-z0-9._-]+:[1-9][0-9]*)*$ ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
slots=$1 num_ranks=0 code=0
shift
for host in ${slots//,/ }; do
    ((num_ranks += ${host##*:}))
done
# The launcher removes this folder if this script is killed, see launch/engines/openmpi.sh.
folder=${TMPDIR:-/tmp}/mlperf_rn50-$MLPERF_RN50_JOB
mkdir -m 700 -- "$folder"
trap 'rm -rf -- "$folder"' EXIT
# horovodrun starts this Python on all hosts; with -I it ignores variables of the modules that are loaded there.
start='import multiprocessing.spawn, sys; sys.executable += " -I" # after multiprocessing has read it
from horovod.runner.launch import run_commandline; run_commandline()'
mkfifo "$folder/out" "$folder/err"
# Remove horovodrun's traceback, and keep its only information: the exit code of the first failed rank, or the error.
awk -v report="$folder/code" '
    BEGIN { printf "" >report } # opened at once, because the guard on this host may remove the folder
    /^Traceback \(most recent call last\)/ { own = 1 }
    own && /^Exit code: / { print $3 >report; fflush(report); own = 0; next }
    own && /^[A-Za-z.]+: / { error = $0 }
    !own { sub(/^\[[0-9]+\]<stderr>:/, ""); print; fflush() }
    END { if (own) print "horovodrun: " error }' <"$folder/err" >&2 &
sed -u 's/^\[[0-9]*\]<stdout>://' <"$folder/out" &
"$here/.venv/bin/python" -I -c "$start" --gloo -np "$num_ranks" -H "$slots" --disable-cache "$@" \
    >"$folder/out" 2>"$folder/err" &
horovodrun=$!
trap 'kill -TERM "$horovodrun"' TERM # it kills the ranks 5 s later; stop requests come from launch/guard.sh
while kill -0 "$horovodrun" 2>/dev/null; do
    code=0
    wait "$horovodrun" || code=$?
done
wait
[ ! -s "$folder/code" ] || code=$(<"$folder/code")
exit "$code"
