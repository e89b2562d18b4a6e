# shellcheck shell=bash disable=SC2034,SC2154
# Functions of launch/setup.sh for what it needs of this machine: sources of packages, Python, and tools for the build.

# Keeps from pip's files and variables only where packages come from, without settings such as user = true, also for uv.
keep_sources() {
    local settings line name value
    local -A of_uv=([index-url]=UV_DEFAULT_INDEX [extra-index-url]=UV_INDEX [find-links]=UV_FIND_LINKS
        [trusted-host]=UV_INSECURE_HOST [no-index]=NO_INDEX [proxy]=ALL_PROXY [cert]=SSL_CERT_FILE
        [client-cert]=SSL_CLIENT_CERT [keyring-provider]=KEYRING [cache-dir]=UV_CACHE_DIR [no-cache-dir]=UV_NO_CACHE
        [timeout]=UV_HTTP_TIMEOUT [default-timeout]=UV_HTTP_TIMEOUT [retries]=UV_HTTP_RETRIES)
    mapfile -t settings < <(pip config list 2>/dev/null | sed -e 's/\\n/ /g' -e 's/^:env:/~/' | LC_ALL=C sort |
        sed -nE "s/^(global|install|wheel|~)\.([a-z-]+)=['\"](.*)['\"]$/\2=\3/p")
    unset "${!PIP_@}" "${!UV_@}"
    export PIP_CONFIG_FILE=/dev/null UV_NO_CONFIG=1 # no other files are read
    export UV_SYSTEM_CERTS=1 UV_INDEX_STRATEGY=unsafe-best-match UV_COMPILE_BYTECODE=1 # as pip
    for line in "${settings[@]}"; do # variables last, because they have precedence
        name=${line%%=*} value=${line#*=}
        [ -n "${of_uv[$name]-}" ] || continue
        export "${of_uv[$name]}=$value"
        name=PIP_${name//-/_}
        export "${name^^}=$value"
    done
    [ -z "${UV_FIND_LINKS-}" ] || UV_FIND_LINKS=${UV_FIND_LINKS// /,}
    name=${PIP_NO_INDEX-}
    case ${name,,} in
        '' | 0 | n | no | f | false | off) ;; # as pip reads them
        *) uv_options=(--no-index) ;;
    esac
}
# Prints what the first Python with one of the names prints for a program, if the program succeeds.
ask_python() { # PROGRAM NAME...
    local python
    while read -r python; do
        ! "$python" -c "$1" </dev/null 2>/dev/null || return 0
    done < <(type -aP "${@:2}")
    return 1
}
# Prints the path of a Python 3.11 outside .venv; nothing if uv must install one.
find_python() {
    ask_python 'import sys; sys.version_info[:2] == (3, 11) or sys.exit(1); print(sys._base_executable)' \
        python3.11 python3 python || command -v uv >/dev/null ||
        fail "python3.11 is missing; install it (Debian 12, and Ubuntu after add-apt-repository ppa:deadsnakes/ppa: \
apt-get install python3.11 python3.11-venv; RHEL, Fedora: dnf install python3.11; conda: conda create -n python3.11 \
python=3.11), or uv, which then installs it (Debian 13: pipx install uv)"
}
make_venv() {
    local python options=()
    if [ "$variant" = ngc ]; then
        python=$(find_container_python)
        options=(--without-pip) # the container's pip is used, because Ubuntu's Python has no ensurepip
    else
        python=$(find_python)
    fi
    rm -f "$state/key" "$state/made" # first, so that a .venv of which a part is left never counts as complete
    rm -rf .venv
    if [ -z "$python" ]; then
        uv venv --quiet --seed --python 3.11 .venv || fail 'uv cannot make a virtual environment with Python 3.11'
    else
        "$python" -m venv "${options[@]}" .venv >&2 || fail "$python cannot make a virtual environment; install its \
venv module (Debian: apt-get install python3.11-venv)"
    fi
    [ "$variant" != ngc ] || add_container_packages "$python"
    mkdir "$state"
}
# Prints the major version of the CUDA toolkit with which Horovod is built; nothing if there is none.
cuda_version() {
    local nvcc=${CUDACXX:-nvcc}
    [ -z "${HOROVOD_CUDA_HOME:-}" ] || nvcc=$HOROVOD_CUDA_HOME/bin/nvcc # which then has precedence for Horovod
    PATH=$PATH:${CUDA_PATH:-}/bin "$nvcc" --version 2>/dev/null | sed -nE 's/.* release ([0-9]+)\..*/\1/p' || true
}
# Downloads and the build take minutes, so check the requirements first. The build does not need Python.h.
need_build_tools() {
    local cuda
    { command -v g++ && command -v make; } >/dev/null || fail "g++ or make is missing, which Horovod's build needs; \
install both (Debian, Ubuntu: apt-get install g++ make; RHEL, Fedora: dnf install gcc-c++ make)"
    cuda=$(cuda_version)
    [ "$variant" = cpu ] || [ "$cuda" = 11 ] || fail "nvcc: got ${cuda:+that of CUDA }${cuda:-none}, expected that of \
CUDA 11, which Horovod's build needs; set HOROVOD_CUDA_HOME to a CUDA 11 toolkit"
    mkdir -p "$partial" 2>/dev/null ||
        fail "$wheels is not writable, but Horovod is kept there; set XDG_CACHE_HOME to another folder"
}
