# shellcheck shell=bash
# Shared by the parts of scripts/soak.d that run tests of cargo. Source it in the repository's root.
PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin

# Runs `cargo test --locked` with these arguments. Fails if no test has run, because a filter that
# matches nothing succeeds.
run_tests() { # ARGUMENT...
    local said status=0
    said=$(mktemp)
    cargo test --locked "$@" | tee "$said" || status=1
    grep -Eq '^test result: .* [1-9][0-9]* passed' "$said" || {
        ((status)) || echo "soak: no test has run: cargo test --locked $*" >&2
        status=1
    }
    rm -f "$said"
    return "$status"
}
