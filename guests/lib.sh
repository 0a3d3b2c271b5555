# shellcheck shell=bash
# Shared by setup, tool, uml, qemu and xen. Source it; it runs nothing.

# Root's cache is in /var/cache, because programs that root starts as another user (`make demo`
# does so) must reach it.
cache=/var/cache/blockyard
((EUID == 0)) || cache=${XDG_CACHE_HOME:-$HOME/.cache}/blockyard
cache=${BLOCKYARD_TOOLS:-$cache}
tree=$cache/tree

# Raise the number by hand when a part's recipe changes: `setup` then rebuilds the part.
declare -A version=(
    [tree]=4 [uml]=1 [qemu]=2 [qemu7]=2 [xen]=2 [xenqemu]=1 [iotests]=1 [selftests]=2
)

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

# Programs of the tree need the tree's C library, which is newer than the host's. Calling its loader
# directly needs neither chroot nor root. --inhibit-cache excludes the host's libraries.
# libceph-common is in a folder of its own, which librados names by an absolute RUNPATH.
libs=$tree/usr/lib/x86_64-linux-gnu
# shellcheck disable=SC2034 # used by the scripts that source this file
loader=("$tree/usr/lib64/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$libs:$libs/ceph")

# ---- the runners ----

run='' guest_pid='' out_pid='' watch_pid='' boot_pid='' boots=0
# Set by the runners whose guests QEMU emulates. Only their boots are repeated.
emulated=''

# Removes the files that a run made and ends the processes that it started, nothing else. It ignores
# signals: one to the whole process group, just after the guest ends, would kill the running `rm`.
cleanup() {
    trap '' INT TERM HUP
    local p
    # The guest leads a process group of its own (see run_guest): User Mode Linux has a process
    # for each address space in it. `jobs -p` finds a guest whose number is not yet in $guest_pid.
    for p in $(jobs -p) $guest_pid; do
        kill -KILL -- "-$p" 2>/dev/null || kill -KILL "$p" 2>/dev/null || :
    done
    # Until these processes have ended they may create files in the folder.
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
    # A signal may arrive when `cleanup` has begun but does not ignore signals yet. `exit` alone
    # would then end it early, so each trap calls `cleanup` again.
    trap 'cleanup && exit 130' INT
    trap 'cleanup && exit 143' TERM
    trap 'cleanup && exit 129' HUP
    # A signal must not end mktemp between creating the folder and printing its name.
    run=$(trap '' INT TERM HUP && exec mktemp -d "${TMPDIR:-/tmp}/blockyard-guest.XXXXXX")
    mkdir "$run/job"
    mkfifo "$run/out"
}

# Fills the folder that the guest mounts: its init, the script, its environment, and $files.
files=()
fill_job() { # SCRIPT K=V...
    local script=$1 pair file
    shift
    for file in ${files[@]+"${files[@]}"}; do
        cp -- "$file" "$run/job/" || die 2 "cannot copy $file"
    done
    # On the script's first line, so that messages name its lines.
    { printf '. /host/env; ' && cat -- "$script"; } >"$run/job/script" ||
        die 2 "cannot read the script $script"
    cp -- "${BASH_SOURCE[0]%/*}/guest-init" "$run/job/init"
    for pair; do
        [[ $pair =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || die 2 "--env needs NAME=VALUE, not '$pair'"
        printf 'export %s=%q\n' "${pair%%=*}" "${pair#*=}"
    done >"$run/job/env"
}

# Kills a guest that does not begin its init because one of its processors gets no timer interrupts.
# The guest's kernel reports this ("detected stalls") every minute. See `run_guest`.
watch_boot() { # PROCESS_GROUP
    local from=$SECONDS
    while sleep 5 && kill -0 "$1" 2>/dev/null; do
        if grep -q 'guest-init: begins' "$run/console"; then return; fi
        if (($(grep -c 'rcu.* detected stalls' "$run/console") >= 2)) ||
            { [[ ! -s $run/console ]] && ((SECONDS - from > 120)) && is_silent "$1"; }; then
            : >"$run/stuck"
            kill -KILL -- "-$1" 2>/dev/null || :
            return
        fi
    done
}

# Writes what the threads of an emulator do, because its guest has printed nothing. Returns whether
# it is not the server for which the emulator waits: its main thread is not in recvmsg (47).
is_silent() { # PROCESS
    local task
    for task in "/proc/$1/task/"*; do
        printf 'silent: %s: call %s; %s\n' "$(<"$task/comm")" "$(<"$task/syscall")" \
            "$(cut -d ' ' -f 3,14,15 "$task/stat")" >>"$run/console"
    done 2>/dev/null
    [[ $(<"/proc/$1/syscall") != '47 '* ]]
}

# Returns whether the guest failed before it began its init, by a known fault of the emulator (QEMU
# without KVM) with several processors, and sets $fault:
# - It lost the timer of a processor, possibly before the kernel could print.
# - It ran code that another processor was patching. The kernel panics with an invalid instruction.
# - A processor used memory regions of a device while another one mapped it (QEMU issue 1921).
# Any other failure may be one of the server, and is reported.
boot_failed() {
    [[ -n $emulated ]] || return 1
    if [[ -e $run/stuck ]]; then
        fault='a processor got no timer interrupts'
        return
    fi
    ! grep -q 'guest-init: begins' "$run/console" || return
    if grep -q 'iotlb_to_section: Assertion' "$run/console"; then
        fault='QEMU failed in iotlb_to_section'
    elif grep -q 'Kernel panic' "$run/console" && grep -q 'invalid opcode' "$run/console"; then
        fault='the kernel panicked at an invalid instruction'
    else
        return 1
    fi
}

# Runs the guest. Its output ($run/out) goes to our standard output as it comes, its consoles go to
# $run/console. Exits with the status that the guest wrote to STATUS_FILE. A guest that fails before
# it begins its init, by a known fault of the emulator, is started again, twice.
run_guest() { # TIMEOUT STATUS_FILE COMMAND...
    local timeout=$1 status_file=$2 ended status fault
    shift 2
    cat "$run/out" &
    out_pid=$!
    # setsid: makes a process group that can be killed as a whole. pdeathsig: the guest ends if this
    # script gets SIGKILL. No core files, because those of a panicking kernel are useless.
    (
        ulimit -c 0
        exec setsid setpriv --pdeathsig KILL "$@"
    ) </dev/null 3>"$run/out" >>"$run/console" 2>&1 &
    guest_pid=$!
    setpriv --pdeathsig KILL sleep "$timeout" &
    watch_pid=$!
    if [[ -n $emulated ]]; then
        # It must not hold the pipes of our output open.
        watch_boot "$guest_pid" </dev/null >/dev/null 2>&1 &
        boot_pid=$!
    fi
    # 2>/dev/null: bash would report a kernel that aborts, and the console has the details.
    { wait -n -p ended "$guest_pid" "$watch_pid" || :; } 2>/dev/null
    [[ -z $boot_pid ]] || { kill "$boot_pid" && wait "$boot_pid"; } 2>/dev/null || :
    if [[ $ended == "$watch_pid" ]]; then
        watch_pid=
        guest_failed "no end after $timeout s"
    fi
    # Kill the rest of the group, which would hold the pipe open. Then wait for the last output.
    kill -KILL -- "-$guest_pid" 2>/dev/null || :
    guest_pid=
    wait "$out_pid" || :
    out_pid=
    if boot_failed && ((++boots < 3)); then
        rm -f -- "$run/stuck"
        : >"$run/console"
        printf '%s: the emulator failed before the guest began its init (%s): start %d of 3\n' \
            "${0##*/}" "$fault" $((boots + 1)) >&2
        kill "$watch_pid" 2>/dev/null || :
        run_guest "$timeout" "$status_file" "$@"
    fi
    status=$(cat "$status_file" 2>/dev/null) || :
    [[ $status =~ ^[0-9]+$ ]] || guest_failed "the guest ended without a status"
    exit "$status"
}

guest_failed() { # REASON
    printf -- '---- the last lines of the guest console ----\n' >&2
    tail -n 40 "$run/console" >&2 || :
    die 125 "$1"
}
