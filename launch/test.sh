#!/usr/bin/env bash
# Sets up what is missing and runs the whole test suite: linters, types, tests.
# Usage: launch/test.sh [PYTEST OPTIONS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
launch/lint.sh
pytest "$@"
