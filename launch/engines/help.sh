# shellcheck shell=bash
# Sourced by the scripts in launch/: after --help or -h prints their header, after --version the version, and ends them.
print_header() {
    sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0"
}
case ${1:-} in
    --help | -h) print_header; exit 0 ;;
    --version) . "$(dirname -- "${BASH_SOURCE[0]}")/program.sh"; run_program --version ;;
esac
