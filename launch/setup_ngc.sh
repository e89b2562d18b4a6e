# shellcheck shell=bash disable=SC2034,SC2154
# What launch/setup.sh does otherwise for the variant ngc, inside NVIDIA's MXNet container: MXNet, Horovod, DALI, NumPy,
# Open MPI and pip stay the container's, .venv gets only what they lack. Sourced by it.

# The path of the container's Python.
find_container_python() {
    local python
    while read -r python; do
        "$python" -c 'import sys
from importlib.util import find_spec
# Not one of .venv, should that be in PATH: it is about to go.
not sys.prefix.endswith("/.venv") and all(map(find_spec, ("mxnet", "horovod", "nvidia.dali", "pip"))) or sys.exit(1)
sys.version_info >= (3, 10) or sys.exit(1)
print(sys.executable)' </dev/null 2>/dev/null && return
    done < <(type -aP python3 python)
    fail "MLPERF_RN50_VARIANT=ngc: got no python3 in PATH that has mxnet, horovod and nvidia.dali, expected to be inside \
NVIDIA's container, such as nvcr.io/nvidia/mxnet:24.06-py3; elsewhere use cpu, cu112 or cu117"
}
# An environment that sees the container's packages behind its own. Without pip, as Ubuntu's Python has no ensurepip.
make_container_venv() {
    local python
    python=$(find_container_python)
    rm -rf .venv
    start "$python" -m venv --without-pip .venv >&2
    wait $! || fail "$python cannot make a virtual environment" 1
    "$python" -c 'import site
for folder in site.getsitepackages():
    print(f"import site; site.addsitedir({folder!r})")' >"$(echo .venv/lib/python3*/site-packages)/container.pth"
    mkdir "$state"
    echo "$variant $PWD/.venv" >"$state/made"
}
# The pins of the lock for what the container has not, or has older than setup.cfg wants it; and its own NumPy.
write_container_pins() {
    .venv/bin/python - launch/requirements_ngc.lock >"$state/pins" <<'PYTHON'
import re
import sys
from importlib import metadata

def normal(name):
    return re.sub('[-_.]+', '-', name).lower()

def numbers(version):
    return [int(n) for n in re.findall(r'\d+', version)]

with open('setup.cfg') as f:
    least = {normal(name): numbers(least) for name, least in re.findall(r'^ +([\w.-]+)>=([\d.]+)', f.read(), re.M)}
found = {normal(d.metadata['Name']): numbers(d.version) for d in metadata.distributions()}
has = {name for name, version in found.items() if version >= least.get(name, [])}
print(f'numpy=={metadata.version("numpy")}')
with open(sys.argv[1]) as f:
    sys.stdout.writelines(line for line in f if normal(line.partition('==')[0]) not in has)
PYTHON
    lock=$state/pins
}
# Programs of the container under the names the launchers use. Not links: mpirun takes the folder it is called in for
# that of its installation, on other hosts too.
link_container_programs() {
    local name path
    for name in mpirun horovodrun; do
        path=$(type -aP "$name" | grep -vxF "$PWD/.venv/bin/$name" | head -n 1) || true
        [ -n "$path" ] || fail "$name is missing in this container; expected NVIDIA's, such as nvcr.io/nvidia/mxnet:24.06-py3"
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$path" >".venv/bin/$name"
        chmod +x ".venv/bin/$name"
    done
}
# The container's own packages may not fit together, which is not ours to judge.
check_own_packages() {
    local own
    own=$(pip check 2>/dev/null | grep '^mlperf-rn50 ') || return 0
    fail "the installed packages do not fit together: ${own%%$'\n'*}"
}
