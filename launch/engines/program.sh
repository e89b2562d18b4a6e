# shellcheck shell=bash
# Removes variables of environment modules that replace packages or parts of the Python in .venv. Sourced on every host.
unset PYTHONPATH PYTHONHOME PYTHONUSERBASE PYTHONSTARTUP PYTHONPLATLIBDIR PYTHONINSPECT PYTHONWARNINGS PYTHONOPTIMIZE
export PYTHONNOUSERSITE=1

# Prints words in single quotes. In the locale C, printf %q writes other letters than English ones as $'\303', which
# Python's shlex does not read.
quote_words() { # WORDS...
    local word
    for word in "$@"; do
        printf "'%s' " "${word//\'/\'\\\'\'}"
    done
}

# Replaces a script in launch/ by the program of its checkout.
run_program() { # ARGUMENTS...
    local here python user
    here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
    python=$here/.venv/bin/python
    # The command line as typed, for messages that repeat it; a container or sbatch has set it already.
    [ "$1" != launch ] || export MLPERF_RN50_COMMAND="${MLPERF_RN50_COMMAND:-$(quote_words "$0" "${@:3}")}"
    [[ " ${*:1:3} " != *' --version '* ]] || set -- --version
    if [ -x "$python" ]; then
        exec "$here/.venv/bin/mlperf-rn50" "$@"
    elif [[ " ${*:1:3} " =~ \ (-h|--help|--version)\  ]]; then # the parsers need only the standard library
        (cd "$here" && python3 -B -m mlperf_rn50 "$@" 2>/dev/null) || {
            sed -n '2s/^# //p' "$0"
            echo 'The list of options needs launch/setup.sh, or python3 3.10 or newer in PATH.'
        }
        exit 0
    elif [ -L "$python" ]; then
        user=$(id -un 2>/dev/null) || user=$EUID # without a name, id prints the number and fails
        echo "mlperf-rn50: $python: user $user cannot execute $(readlink -m -- "$python"), to which it links; give access to that Python, or run launch/setup.sh as this user in a checkout of its own" >&2
    else
        echo "mlperf-rn50: $here/.venv is missing; run launch/setup.sh there" >&2
    fi
    exit 2
}
