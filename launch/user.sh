#!/usr/bin/env bash
# Runs a command in the image as whoever it was started as: a user without a name gets one, which ssh and sshd ask for.
# Usage: launch/user.sh COMMAND...
# Clusters start containers as any user. The image looks for names in /var/lib/extrausers, too, where anybody may add one;
# groups below 500, such as 0, are not taken from there, so the group of the entry is only a number.

set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
if ! getent passwd "$(id -u)" >/dev/null; then
    echo "user$(id -u):x:$(id -u):$(id -u)::${HOME:-/tmp}:/bin/bash" >>/var/lib/extrausers/passwd
fi
exec "$@"
