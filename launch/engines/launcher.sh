#!/usr/bin/env bash
# Executes the program behind a launch script, which starts the ranks with the other scripts in launch/engines.
# Usage: launch/engines/launcher.sh SCRIPT [OPTIONS...]     this is the last line of every launcher
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
script=launch/$(basename -- "$1")
shift
. "$here/launch/engines/isolate.sh"
python=$here/.venv/bin/python
if [ -L "$python" ] && [ ! -x "$python" ]; then
    echo "$script: $python: user $(id -un 2>/dev/null || id -u) cannot execute $(readlink -m -- "$python"), to which it links; give access to that Python, or run launch/setup.sh as this user in a checkout of its own" >&2
    exit 2
fi
if [ ! -x "$python" ]; then
    echo "$script: $here/.venv is missing; run launch/setup.sh there" >&2
    exit 2
fi
exec "$python" "$here/mlperf_rn50/launch/safe_path.py" mlperf_rn50.launch "$here/$script" "$@"
