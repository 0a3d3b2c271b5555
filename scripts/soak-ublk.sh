# shellcheck shell=bash
# Shared by the parts of scripts/soak.d that run whole guests with ublk. Source it in the
# repository's root. Sets $work (removed at exit), $work/blockyard and $kernels; defines `in_guest`.
. guests/lib.sh
PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
# KERNELS="6 7": the guests' kernels (see guests/README.md). BLOCKYARD: the program to test.
read -ra kernels <<<"${KERNELS:-6 7}"

guests/setup all
guests/setup qemu7
program=${BLOCKYARD:-${CARGO_TARGET_DIR:-target}/release/blockyard}
[[ -n ${BLOCKYARD:-} ]] || cargo build --release --locked --package blockyard-cli </dev/null
work=$(mktemp -d "${TMPDIR:-/var/tmp}/blockyard-soak.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
strip -o "$work/blockyard" "$program"

# Runs a script in a guest with an empty disk of 4 GiB.
in_guest() { # KERNEL SCRIPT OPTION...
    local kernel=$1 script=$2
    shift 2
    rm -f "$work/disk"
    truncate -s 4G "$work/disk"
    guests/qemu --smp 2 --kernel "$kernel" --disk file="$work/disk" --file "$work/blockyard" "$@" \
        "$script"
}
