//! `attach`, `detach` and their server are killed in the middle of their work: the command, the
//! server, or both. After each kill the image can be attached, and has each answered write.
//!
//! strace kills at the n-th call of a system call. `BLOCKYARD_KILLS=N` kills at N calls of each
//! kind, on both kernels.

use crate::fixture::{on_both_kernels, on_kernel};

/// Functions for the steps. An attach leaves the device attached, a detach leaves none.
const KILLED: &str = r#"
dd if=/dev/urandom of=base.img bs=1M count=4 status=none
truncate -s 32M base.img
blockyard image create -q -f qcow2 -b base.img -F raw top.qcow2
gone() { while is_attached; do nap 0.02; done; }
journals() { find /run/blockyard-journals -type f 2>/dev/null || :; }
none() { ! ls /dev/ublkc* 2>/dev/null; }
said() { # TEXT
    [[ $(</tmp/said) == *"$1"* ]] || { cat /tmp/said && return 1; }
}
written=
# Attaches the image, reads the last answered write, and writes again.
again() { # WHAT
    device=$(blockyard attach top.qcow2) || { echo "$1" && cat /run/blockyard-attach/*.log && return 1; }
    [[ ! $written ]] || cmp -n 65536 /tmp/written $device || { echo "$1" && return 1; }
    head -c 65536 /dev/urandom >/tmp/written
    dd if=/tmp/written of=$device bs=64k oflag=direct status=none
    written=1
}
# Runs a command that is killed at a system call: $ended. -f: also its server is killed there.
killed() { # CALL:NUMBER [-f] COMMAND...
    local call=${1%:*} number=${1#*:} options=()
    shift
    [[ $1 != -f ]] || { options=(-f) && shift; }
    [[ ! ${path:-} ]] || options+=(-P $path)
    ended=0
    strace -D -qq "${options[@]}" -o /tmp/strace -e trace=$call -e inject=$call:signal=KILL:when=$number \
        /host/blockyard "$@" >/tmp/said 2>&1 || ended=$?
}

# The command is killed, when its server is ready or when it has printed the device.
kill_command() { # CALL:NUMBER
    killed $1 attach top.qcow2
    [[ $ended == 137 ]] || { cat /tmp/said && return 1; }
    gone
    none
    again "the command was killed at $1"
}
# The server is killed when it opens or maps the character device.
kill_maker() { # CALL:NUMBER
    path=/dev/ublkc0 killed $1 -f attach top.qcow2
    [[ $ended == 1 ]] || { cat /tmp/said && return 1; }
    said 'signal 9 ended the server of the device before it was ready'
    none
    log=$(sed -n 's/.*(log: \([^)]*\)).*/\1/p' /tmp/said)
    again "the server was killed at $1"
    # The log that the message names is still there after the next attach.
    [[ -f $log ]] || { cat /tmp/said && return 1; }
}
# The server is killed at a call of io_uring_enter. If `attach` then removes the device, it is
# killed at the same one.
kill_attach() { # NUMBER
    killed io_uring_enter:$1 -f attach top.qcow2
    case $ended in
    0) blockyard detach $(</tmp/said) || : ;;
    1) said 'signal 9 ended the server of the device before it was ready'
        # The kernel may still read the partitions, and would make a removal wait.
        none >/dev/null || said 'its device stays, and waits for the next `attach`: /dev/ublkb0 waits for a server' ;;
    137) ;;
    *) cat /tmp/said && return 1 ;;
    esac
    gone
    again "the server was killed at call $1"
}
kill_detach() { # NUMBER
    killed io_uring_enter:$1 detach $device
    blockyard detach $device >/tmp/said 2>&1 || said 'there is no device'
}
# The server is killed during `detach`.
kill_ending() { # NUMBER
    local server tracer
    server=$(pgrep -f -- --attached | head -n 1)
    strace -qq -f -o /tmp/strace -e trace=io_uring_enter -e inject=io_uring_enter:signal=KILL:when=$1 -p $server &
    tracer=$!
    until grep -q '^TracerPid:.[1-9]' /proc/$server/status; do nap 0.02; done
    # `detach` succeeds only if the server had closed the image.
    blockyard detach $device >/tmp/said 2>&1 || said 'ended before it had closed the image'
    [[ $(</tmp/said) == *'before it had closed'* ]] || [[ -z $(journals) ]]
    none
    gone
    wait $tracer || :
}

if [[ ! $kills ]]; then
    kill_command write:2
    kill_ending 2
    said 'ended before it had closed the image'
    kill_attach 17
    kill_detach 3
else
    for call in rename:1 write:1 write:2; do
        kill_command $call
        blockyard detach $device
    done
    for call in open:1 mmap:1; do
        kill_maker $call
        blockyard detach $device
    done
    for ((call = 1; call <= kills; call++)); do
        kill_attach $call
        kill_detach $call
        again "detach was killed at call $call"
        kill_ending $call
    done
fi
again "the end"
blockyard detach $device
# Nothing is left but the logs of devices, and that of the last server that was killed early.
ls /run/blockyard-attach | not grep -v -e '^ublkb[0-9]*\.log$' -e '^killed-top.qcow2.log$'
[[ -z $(journals) ]]
blockyard image check top.qcow2 >/dev/null
dmesg | not grep -E 'I/O error|BUG|WARNING|Oops|hung'
"#;

#[test]
fn attach_works_after_kills_of_attach_and_detach() {
    match std::env::var("BLOCKYARD_KILLS") {
        Ok(kills) => on_both_kernels(1, &format!("kills={kills}\n{KILLED}")),
        Err(_) => drop(on_kernel("7", 1, &format!("kills=\n{KILLED}"))),
    }
}
