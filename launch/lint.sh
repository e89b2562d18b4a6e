#!/usr/bin/env bash
# Runs ruff (rules and format), mypy and shellcheck on all files. The rules are in pyproject.toml and setup.cfg.
# Usage: launch/lint.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/engines/help.sh"
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
. launch/engines/program.sh
export PATH="$PWD/.venv/bin:$PATH"
[ -w . ] || export RUFF_NO_CACHE=true MYPY_CACHE_DIR=/dev/null # their caches are in the checkout
ruff check mlperf_rn50 launch tests benchmarks docs
ruff format --check --quiet mlperf_rn50 launch tests benchmarks docs || {
    echo 'launch/lint.sh: not formatted; run: ruff format mlperf_rn50 launch tests benchmarks docs' >&2
    exit 1
}
mypy mlperf_rn50
# Refuse words that CONTRIBUTING.md rules out.
words='told|said|says so|nobody|somebody|whom|foretell|witness|goes on|stands still|a word|believed?'
if grep -rnwiE --include='*.py' --include='*.md' --include='*.sh' --include='*.yaml' --include='*.html' --include='*.cfg' --include='*.ini' \
    --exclude=lint.sh --exclude-dir=logs --exclude-dir=.venv "$words" mlperf_rn50 launch docs tests benchmarks ./*.md ./*.cfg
then
    echo 'launch/lint.sh: the lines above have words that CONTRIBUTING.md rules out; use plain technical English' >&2
    exit 1
fi
shellcheck -x -P SCRIPTDIR:. launch/*.sh launch/engines/*.sh launch/*.sbatch benchmarks/*.sh tests/*.sh tests/gpu/*.sh .ci/run
