# shellcheck shell=bash
# Shared by setup, tool, uml, qemu and xen. Source it; it runs nothing.

# Root's is the machine's: what root runs as another user (`make demo` does) must reach it.
cache=/var/cache/blockyard
((EUID == 0)) || cache=${XDG_CACHE_HOME:-$HOME/.cache}/blockyard
cache=${BLOCKYARD_TOOLS:-$cache}
tree=$cache/tree

# Raised by hand when a part's recipe changes: `setup` then builds it anew.
declare -A version=([tree]=3 [uml]=1 [qemu]=1 [qemu7]=1 [xen]=1 [xenqemu]=1 [iotests]=1 [selftests]=2)

die() { # STATUS MESSAGE...
    local status=$1
    shift
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit "$status"
}

have() { # PART
    [[ -f $cache/$1.stamp && $(<"$cache/$1.stamp") == "${version[$1]}" ]]
}

need() { # PART
    have "$1" || die 125 "part '$1' is not in $cache: run ${BASH_SOURCE[0]%/*}/setup $1"
}

# Programs of the tree need the tree's C library, which is newer than the host's. Calling its
# loader by hand needs neither chroot nor root; --inhibit-cache keeps the host's libraries out.
# libceph-common lies in a folder of its own, which librados names by an absolute RUNPATH.
libs=$tree/usr/lib/x86_64-linux-gnu
# shellcheck disable=SC2034 # used by those who source this
loader=("$tree/usr/lib64/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$libs:$libs/ceph")

# ---- the runners ----

run='' guest_pid='' out_pid='' watch_pid=''

# Removes what a run made and ends what it started, and nothing else. To its end: a signal to the whole group that comes
# when the guest has just ended would find `rm` at work, and end that.
cleanup() {
    trap '' INT TERM HUP
    local p
    # The guest leads a process group of its own (see run_guest): User Mode Linux has a process
    # per address space in there. (Asked of bash, for we may come before a number was noted.)
    for p in $(jobs -p) $guest_pid; do
        kill -KILL -- "-$p" 2>/dev/null || kill -KILL "$p" 2>/dev/null || :
    done
    # Until they are gone they may make files in the folder.
    wait 2>/dev/null || :
    guest_pid=
    [[ -z $run ]] || rm -rf -- "$run"
}

join() { # WORD...: with commas
    local IFS=,
    echo "$*"
}

begin_run() {
    trap cleanup EXIT
    # Also where `cleanup` has begun, and knows nothing of the signal yet: `exit` alone would make an end of it there.
    trap 'cleanup && exit 130' INT
    trap 'cleanup && exit 143' TERM
    trap 'cleanup && exit 129' HUP
    # No folder is made whose name does not get here.
    run=$(trap '' INT TERM HUP && exec mktemp -d "${TMPDIR:-/tmp}/blockyard-guest.XXXXXX")
    mkdir "$run/job"
    mkfifo "$run/out"
}

# The guest gets a folder with its init, the script and its environment, and what is in $files.
files=()
fill_job() { # SCRIPT K=V...
    local script=$1 pair file
    shift
    for file in ${files[@]+"${files[@]}"}; do
        cp -- "$file" "$run/job/" || die 2 "cannot copy $file"
    done
    cat -- "$script" >"$run/job/script" || die 2 "cannot read the script $script"
    cp -- "${BASH_SOURCE[0]%/*}/guest-init" "$run/job/init"
    for pair; do
        [[ $pair =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || die 2 "--env wants NAME=VALUE, not '$pair'"
        printf 'export %s=%q\n' "${pair%%=*}" "${pair#*=}"
    done >"$run/job/env"
}

# Runs the guest; what it writes to $run/out goes to our standard output as it comes, its consoles
# go to $run/console. Exits with the status that the guest left in the file STATUS.
run_guest() { # TIMEOUT STATUS_FILE COMMAND...
    local timeout=$1 status_file=$2 ended status
    shift 2
    cat "$run/out" &
    out_pid=$!
    # setsid: a process group to end as a whole. pdeathsig: should this script be killed by
    # SIGKILL, what it started goes with it. Core files of a panicking kernel help nobody.
    (
        ulimit -c 0
        exec setsid setpriv --pdeathsig KILL "$@"
    ) </dev/null 3>"$run/out" >>"$run/console" 2>&1 &
    guest_pid=$!
    setpriv --pdeathsig KILL sleep "$timeout" &
    watch_pid=$!
    # Quiet: bash reports a kernel that aborts, and the console says it better.
    { wait -n -p ended "$guest_pid" "$watch_pid" || :; } 2>/dev/null
    if [[ $ended == "$watch_pid" ]]; then
        watch_pid=
        guest_failed "no end after $timeout s"
    fi
    # Stragglers of the group would hold the pipe open; then let the last of the output through.
    kill -KILL -- "-$guest_pid" 2>/dev/null || :
    guest_pid=
    wait "$out_pid" || :
    out_pid=
    status=$(cat "$status_file" 2>/dev/null) || :
    [[ $status =~ ^[0-9]+$ ]] || guest_failed "the guest ended without a status"
    exit "$status"
}

guest_failed() { # REASON
    printf -- '---- the last lines of the guest console ----\n' >&2
    tail -n 40 "$run/console" >&2 || :
    die 125 "$1"
}
