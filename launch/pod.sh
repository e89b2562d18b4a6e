#!/usr/bin/env bash
# Trains in a pod of an Indexed Job of Kubernetes: the command of its container. launch/pod.sh --help says more.
# Usage: launch/pod.sh --config FILE [--run-dir DIR] [OPTIONS of mlperf-rn50 train...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "$here/.venv/bin/python" "$here/mlperf_rn50/safe_path.py" mlperf_rn50.launch.pod "$@"
