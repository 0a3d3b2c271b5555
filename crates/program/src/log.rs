//! The log on standard error: its level and its format.

use std::io::{self, IsTerminal};

use tracing::Level;
use tracing_subscriber::fmt::MakeWriter;

/// Starts the log. `writer` receives each message in one piece.
pub fn start(level: Level, writer: impl for<'w> MakeWriter<'w> + Send + Sync + 'static) {
    // The journal has its own clock.
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let log = tracing_subscriber::fmt()
        .with_writer(writer)
        // The library would report a failed write by `eprintln!`, which panics.
        .log_internal_errors(false)
        .with_max_level(level)
        .with_target(false)
        .with_ansi(io::stderr().is_terminal());
    if journal { log.without_time().init() } else { log.init() }
}

/// A text that names no level.
#[derive(Debug, thiserror::Error)]
#[error("a level is error, warn, info, debug or trace")]
pub struct UnknownLevel;

/// Parses the value of `--log`.
pub fn parse_level(s: &str) -> Result<Level, UnknownLevel> {
    let levels = ["error", "warn", "info", "debug", "trace"];
    let level = s.to_ascii_lowercase();
    let known = levels.contains(&level.as_str()).then(|| level.parse().ok()).flatten();
    known.ok_or(UnknownLevel)
}
