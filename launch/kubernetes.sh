#!/usr/bin/env bash
# Prints the manifests for training on a Kubernetes cluster.
# Usage: launch/kubernetes.sh --image IMAGE --config FILE --volume CLAIM:PATH [OPTIONS...] | kubectl apply -f -

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/launch/engines/isolate.sh"
exec "$here/.venv/bin/python" "$here/mlperf_rn50/launch/safe_path.py" mlperf_rn50.launch.kubernetes.manifests "$@"
