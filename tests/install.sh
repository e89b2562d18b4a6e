#!/usr/bin/env bash
# Installs the Debian packages for tests of clusters, report page and shell completion. Requires root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends openssh-client openssh-server iproute2 util-linux \
    munge slurm-wlm libpmix2 libpmix-dev debootstrap buildah podman docker.io runc chromium zsh fish >/dev/null
