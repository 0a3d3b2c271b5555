# shellcheck shell=bash
# Shared by the parts of scripts/soak.d that boot an emulated Xen. Source it in the repository's
# root. Sets $work (removed at exit) and $work/blockyard; defines `in_xen`. BLOCKYARD: the program
# to test.
# shellcheck source=guests/lib.sh
. guests/lib.sh
PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin

guests/setup all
program=${BLOCKYARD:-${CARGO_TARGET_DIR:-target}/release/blockyard}
[[ -n ${BLOCKYARD:-} ]] || cargo build --release --locked --package blockyard-cli </dev/null
work=$(mktemp -d "${TMPDIR:-/var/tmp}/blockyard-soak.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
strip -o "$work/blockyard" "$program"

# The beginning of the scripts of both domains.
cat >"$work/common" <<'BOTH'
set -euo pipefail

# Waits until a command succeeds.
until_done() { # COMMAND...
    local i
    for ((i = 0; i < 1200; i++)); do
        if "$@"; then return; fi
        sleep 0.1
    done
    echo "this does not become true within 120 s: $*"
    return 1
}

# Fails if the kernel has logged trouble.
quiet_kernel() {
    ! dmesg | grep -E 'I/O error|BUG|WARNING|Oops|hung task|soft lockup|Failed to end'
}

# Ends the servers of this script. Fails if a server ends with an error, such as of its last flush.
stop_servers() {
    local pid
    for pid in $(jobs -p); do
        kill "$pid"
        wait "$pid"
    done
}
BOTH

# Runs scripts in dom0 and in the domU. In dom0 `serve` is defined (guests/xen-serve).
in_xen() { # DOM0_SCRIPT DOMU_SCRIPT OPTION...
    local dom0=$1 domu=$2
    shift 2
    cat "$work/common" guests/xen-serve "$dom0" >"$work/dom0-all"
    cat "$work/common" "$domu" >"$work/domu-all"
    guests/xen --program "$work/blockyard" --dom0 "$work/dom0-all" "$@" "$work/domu-all"
}

# For scripts of dom0: counts the resources of guests that back ends hold.
cat >"$work/holdings" <<'DOM0'
# Prints the numbers of event channels between dom0 and guests, and of Xenstore nodes of back ends.
# Without leaks, two calls print the same.
holdings() {
    echo "$(/usr/lib/xen-4.17/bin/lsevtchn 0 | grep -c Interdomain || :) channels," \
        "$(xenstore-ls /local/domain/0/backend 2>/dev/null | wc -l) nodes"
}

# Fails if a domain that has ended still exists, which it does while its grants are mapped.
no_grants_left() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    ! xl dmesg | grep -E '\[0x[0-9a-f]+\]' || return 1
    [[ $(xl list | wc -l) == 2 ]] || { xl list && return 1; }
}

# Starts a server of a disk in the background: $pid.
begin() { # SERVE_ARGUMENT...
    /host/blockyard serve "$@" >/tmp/said 2>>/tmp/log &
    pid=$!
    until grep -qsx ready /tmp/said; do
        kill -0 $pid 2>/dev/null || { cat /tmp/log && exit 1; }
        sleep 0.02
    done
}
DOM0
