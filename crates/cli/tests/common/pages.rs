//! The commands of the pages in docs/. Blocks that begin with "```sh" run on the host, and blocks
//! that begin with "```sh guest" run as root of a guest.

use std::path::Path;

/// Shell code that makes `blockyard serve` run in the background. [`END`] ends the servers.
pub const SERVE: &str = r#"
set -euo pipefail
blockyard() {
    if [[ $1 != serve || " $* " = *" --check-config "* ]]; then "$BLOCKYARD" "$@"; return; fi
    "$BLOCKYARD" "$@" >out 2>>log & servers+=($!)
    until grep -qx ready out; do kill -0 "${servers[-1]}" || { cat log >&2; return 1; }; sleep 0.05; done
    rm out
}
# Bash goes on after `! COMMAND` in any case.
not() { ! "$@"; }
servers=()
"#;

/// Shell code that ends the servers of [`SERVE`].
pub const END: &str = r#"
for server in "${servers[@]}"; do
    # The page itself may have stopped it.
    if kill "$server" 2>/dev/null; then wait "$server"; fi
done
echo "all of it has run"
"#;

/// Returns the text of a page.
pub fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("reading {}: {e}", path.display()))
}

/// Returns the text of all blocks with this fence, in the page's order.
pub fn blocks(page: &str, fence: &str) -> String {
    let mut inside = false;
    let mut out = String::new();
    for line in page.lines() {
        match (inside, line) {
            (false, line) if line == fence => inside = true,
            (true, "```") => inside = false,
            (true, line) => out += &format!("{line}\n"),
            _ => {}
        }
    }
    out
}

/// Returns a script that runs the blocks for a guest. The guest has the program under test as
/// /host/blockyard. The last line of the output is `all of it has run`.
pub fn guest_script(name: &str) -> String {
    let text = blocks(&page(name), "```sh guest");
    assert!(text.lines().count() > 3, "{name} has no commands for a guest");
    format!("BLOCKYARD=/host/blockyard\n{SERVE}{text}{END}")
}
