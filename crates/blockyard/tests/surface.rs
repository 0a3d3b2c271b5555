//! The public surface of the library, compared with the listing `api.txt`.
//!
//! The listing has the signatures of public items, in the files that define them. Items that are
//! public for other crates of the workspace only are hidden from the documentation, and not in it.
//! If a line of it
//! changes or goes, programs of users may not compile any more: that needs a new version.

use std::fmt::Write;
use std::path::Path;

/// The files that define what `lib.rs` exports. Private items in them are marked `pub(...)`.
const FILES: [&str; 15] = [
    "src/lib.rs",
    "src/disk.rs",
    "src/error.rs",
    "src/handover/next.rs",
    "src/handover/this.rs",
    "src/testing.rs",
    "src/yard.rs",
    "../storage/src/cache.rs",
    "../storage/src/targets/device.rs",
    "../storage/src/targets/file.rs",
    "../storage/src/targets/lock.rs",
    "../storage/src/targets/map.rs",
    "../storage/src/targets/shape.rs",
    "../storage/src/targets/target.rs",
    "../ring/src/mem/segments/lent.rs",
];

/// Items of these files that `lib.rs` does not export.
const INTERNAL: [&str; 5] =
    ["AskWorker", "OpenTarget", "async fn simulated", "fn end(&self)", "fn handle(&self)"];

fn listing() -> String {
    let mut out = String::new();
    for name in FILES {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        let _ = writeln!(out, "# {}", name.trim_start_matches("../"));
        let (mut in_trait, mut in_enum, mut item) = (false, false, String::new());
        let mut hidden = false;
        for line in text.lines() {
            let begins = line.trim_start().starts_with("pub ");
            hidden = line.trim() == "#[doc(hidden)]" || hidden && !line.is_empty();
            in_trait = match line {
                "}" => false,
                _ => in_trait || line.starts_with("pub trait "),
            };
            in_enum = match line {
                "}" => false,
                _ => in_enum || line.starts_with("pub enum "),
            };
            let method = in_trait && line.starts_with("    fn ");
            let field =
                in_enum && line.starts_with("    ") && !line.trim().starts_with(['/', '#', '}']);
            if item.is_empty() && !begins && !method && !field {
                continue;
            }
            item = format!("{item} {}", line.trim()).trim().to_string();
            let ends = match item.starts_with("pub use ") {
                true => item.ends_with(';'),
                false => [" {", ";", ",", "}", ")"].iter().any(|end| item.ends_with(end)),
            };
            if ends && item.matches('(').count() == item.matches(')').count() {
                let item = std::mem::take(&mut item);
                if !std::mem::take(&mut hidden) && !INTERNAL.iter().any(|name| item.contains(name))
                {
                    let _ = writeln!(out, "{}", item.trim_end_matches(" {"));
                }
            }
        }
    }
    out
}

#[test]
fn the_public_surface_is_the_listed_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("api.txt");
    let now = listing();
    if std::env::var_os("BLOCKYARD_LIST_API").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let (old, new): (Vec<_>, Vec<_>) = (listed.lines().collect(), now.lines().collect());
    let removed: Vec<_> = old.iter().filter(|line| !new.contains(line)).collect();
    let added: Vec<_> = new.iter().filter(|line| !old.contains(line)).collect();
    assert!(
        listed == now,
        "the public surface has changed: removed {removed:#?}, added {added:#?}; if that is \
         intended, write api.txt again: BLOCKYARD_LIST_API=1 cargo test -p blockyard --test surface"
    );
}
