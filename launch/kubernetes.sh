#!/usr/bin/env bash
# Prints the manifests for training on a Kubernetes cluster: launch/kubernetes.sh OPTIONS... | kubectl apply -f -
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/program.sh"
run_program launch kubernetes "$@"
