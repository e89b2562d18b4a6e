# shellcheck shell=bash disable=SC2034,SC2154
# Functions of launch/setup.sh for the variant ngc, inside NVIDIA's MXNet container: .venv uses the container's MXNet,
# Horovod, DALI, NumPy, Open MPI and pip, and contains only additional packages.

# Prints the path of a Python if it has the container's packages. It is not that of .venv, which is about to be removed.
examine_python() { # PYTHON
    "$1" -c 'import sys
from importlib.util import find_spec
not sys.prefix.endswith("/.venv") and all(map(find_spec, ("mxnet", "horovod", "nvidia.dali", "pip"))) or sys.exit(1)
sys.version_info >= (3, 10) or sys.exit(1)
print(sys.executable)' </dev/null 2>/dev/null
}
find_container_python() {
    local python
    while read -r python; do
        examine_python "$python" || PYTHONPATH=${container_path-} examine_python "$python" || continue
        return
    done < <(type -aP python3 python)
    fail "MLPERF_RN50_VARIANT=ngc: got no python3 in PATH with mxnet, horovod and nvidia.dali, expected NVIDIA's \
container, such as nvcr.io/nvidia/mxnet:24.06-py3; elsewhere use cpu, cu112 or cu117"
}
# Makes a .venv that also finds the container's packages. It has no pip, because Ubuntu's Python has no ensurepip.
make_container_venv() {
    local python
    python=$(find_container_python)
    rm -rf .venv
    start "$python" -m venv --without-pip .venv >&2
    wait $! || fail "$python cannot make a virtual environment" 1
    # Some packages of the container may be in PYTHONPATH, which is not read later.
    [ -z "$(examine_python "$python")" ] || container_path=''
    "$python" -c 'import site, sys
for folder in site.getsitepackages() + [folder for folder in sys.argv[1].split(":") if folder]:
    print(f"import site; site.addsitedir({folder!r})")' "$container_path" >"$(echo .venv/lib/python3*/site-packages)/container.pth"
    mkdir "$state"
    echo "$variant $PWD/.venv" >"$state/made"
}
# Writes pins for the container's NumPy, and for packages that the container lacks or that are too old for setup.cfg.
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
# Creates wrappers for programs of the container. With links, mpirun would look for its installation in .venv, also on
# other hosts.
link_container_programs() {
    local name path
    for name in mpirun horovodrun; do
        path=$(type -aP "$name" | grep -vxF "$PWD/.venv/bin/$name" | head -n 1) || true
        [ -n "$path" ] || fail "$name is missing in this container; expected NVIDIA's, such as nvcr.io/nvidia/mxnet:24.06-py3"
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$path" >".venv/bin/$name"
        chmod +x ".venv/bin/$name"
    done
}
# Conflicts among the container's own packages are ignored.
check_own_packages() {
    local own
    own=$(pip check 2>/dev/null | grep '^mlperf-rn50 ') || return 0
    fail "the installed packages conflict: ${own%%$'\n'*}"
}
