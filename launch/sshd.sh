#!/usr/bin/env bash
# Runs an ssh server as the current user, root or not, for the launcher of an MPIJob.
# Usage: launch/user.sh launch/sshd.sh --port PORT --authorized-keys FILE
# Each start generates a new host key in a new folder. Only keys in FILE are accepted, and no passwords.

. "$(dirname -- "${BASH_SOURCE[0]}")/engines/help.sh"
set -euo pipefail
fail() {
    echo "launch/sshd.sh: $*" >&2
    exit 2
}
port='' keys=''
while [ $# -gt 0 ]; do
    case $1 in
        --port | --authorized-keys) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
        --port) port=$2 ;;
        --authorized-keys) keys=$2 ;;
        *) fail "got $1, expected --port or --authorized-keys" ;;
    esac
    shift 2
done
[[ $port =~ ^[1-9][0-9]{0,4}$ && $port -lt 65536 ]] || fail "--port: got ${port:-nothing}, expected 1 to 65535"
# sshd would start even if the port is free only for IPv4 or only for IPv6; launchers might reach the other server.
printf -v hex %04X "$port"
! grep -qs ": [0-9A-F]*:$hex [0-9A-F:]* 0A " /proc/net/tcp /proc/net/tcp6 || # 0A: listening
    fail "--port: $port is in use on $(uname -n); stop its server or choose another port"
[ -r "$keys" ] || fail "--authorized-keys: cannot read ${keys:-nothing}"
[[ $keys =~ ^/[A-Za-z0-9/._-]*$ ]] || fail "--authorized-keys: got $keys, expected an absolute path without spaces"

# sshd gives sessions no variable of the container by itself, and reads only the first SetEnv.
settings=()
for name in LD_LIBRARY_PATH $(compgen -e | grep -E '^(NCCL|UCX)_' || true); do
    [[ -z ${!name:-} || ${!name} = *[\"\\]* ]] || settings+=("\"$name=${!name}\"")
done
folder=$(mktemp -d)
ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
cat >"$folder/sshd_config" <<EOF
Port $port
HostKey $folder/host_key
PidFile none
AuthorizedKeysFile $keys
# The mounted keys may belong to another user.
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
${settings:+SetEnv ${settings[*]}}
# mpirun and the guards of all launchers connect at the same time.
MaxStartups 200
EOF
exec /usr/sbin/sshd -D -e -f "$folder/sshd_config"
