#!/usr/bin/env bash
# Executes the program behind a launch script, which starts the ranks with the other scripts in launch/engines.
# Usage: launch/engines/launcher.sh SCRIPT [OPTIONS...]     this is the last line of every launcher
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
script=launch/$(basename -- "$1")
shift
. "$here/launch/engines/isolate.sh"
if [ ! -x "$here/.venv/bin/python" ]; then
    echo "$script: $here/.venv is missing; run launch/setup.sh there" >&2
    exit 2
fi
exec "$here/.venv/bin/python" "$here/mlperf_rn50/launch/safe_path.py" mlperf_rn50.launch "$here/$script" "$@"
