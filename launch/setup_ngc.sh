# shellcheck shell=bash disable=SC2034,SC2154
# Functions of launch/setup.sh for the variant ngc, inside NVIDIA's MXNet container: .venv uses the container's MXNet,
# Horovod, DALI, NumPy, Open MPI and pip, and contains only additional packages.

# Prints the path of a Python that has the container's packages. It is not that of .venv, which is about to be removed.
is_container='import sys
from importlib.util import find_spec
fits = sys.version_info >= (3, 10) and not sys.prefix.endswith("/.venv")
fits and all(map(find_spec, ("mxnet", "horovod", "nvidia.dali", "pip"))) or sys.exit(1)
print(sys.executable)'
find_container_python() {
    ask_python "$is_container" python3 python || PYTHONPATH=${container_path-} ask_python "$is_container" python3 python ||
        fail "MLPERF_RN50_VARIANT=ngc: got no python3 in PATH with mxnet, horovod and nvidia.dali, expected NVIDIA's \
container, such as nvcr.io/nvidia/mxnet:24.06-py3; elsewhere use cpu, cu112 or cu117"
}
# Makes .venv find the packages of the container's Python, also those in PYTHONPATH, which is not read later.
add_container_packages() { # PYTHON
    ! "$1" -c "$is_container" >/dev/null 2>&1 || container_path=''
    "$1" -c 'import site, sys
for folder in site.getsitepackages() + [folder for folder in sys.argv[1].split(":") if folder]:
    print(f"import site; site.addsitedir({folder!r})")' "$container_path" >"$(echo .venv/lib/python3*/site-packages)/container.pth"
}
# Writes pins for the container's NumPy, and for packages that the container lacks or that are too old for setup.cfg.
write_container_pins() {
    .venv/bin/python - >"$state/pins" <<'PYTHON'
import re
from importlib import metadata

def normal(name):
    return re.sub('[-_.]+', '-', name).lower()

def numbers(version):
    return [int(n) for n in re.findall(r'\d+', version)]

with open('setup.cfg') as config, open('launch/requirements_ngc.lock') as lock:
    least = {normal(name): numbers(least) for name, least in re.findall(r'^ +([\w.-]+)>=([\d.]+)', config.read(), re.M)}
    has = {normal(d.name) for d in metadata.distributions() if numbers(d.version) >= least.get(normal(d.name), [])}
    print(f'numpy=={metadata.version("numpy")}')
    print(*(line for line in lock if normal(line.partition('==')[0]) not in has), sep='')
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
