//! Standard output and standard error of commands.
//!
//! What must hold: no failure to write them panics, as `println!` and `eprintln!` do (clippy
//! refuses those). A failure to write standard output ends the command: quietly if the reader of a
//! pipe has gone. Notes on standard error may be lost.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, Write};

use blockyard_ring::text::{clean, is_deceptive};

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output cannot be written")]
pub struct OutputError(#[from] io::Error);

impl OutputError {
    /// Returns whether the reader has closed the pipe, as `head` does when it has seen enough.
    pub fn reader_has_gone(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints `text` on standard output, and flushes it.
pub fn print(text: impl Display) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).map_err(OutputError)
}

/// Returns a word as a shell reads it, for a command that a user may copy. Control characters do
/// not reach the terminal.
pub fn shell(word: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-:@+/".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into();
    }
    let text = clean(word).replace('\'', "'\\''");
    format!("'{text}'").into()
}

/// Prints a line on standard error. A line that cannot be written is dropped. It may contain names
/// that others have chosen.
pub fn note(line: impl Display) {
    let line = line.to_string().replace(|c| !"\n\t".contains(c) && is_deceptive(c), "?");
    // Each line is one write, so that lines of several threads do not mix.
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_if_a_shell_would_change_them() {
        assert_eq!(shell("a-b.c"), "a-b.c");
        assert_eq!([shell("a b"), shell("it's"), shell("")], ["'a b'", "'it'\\''s'", "''"]);
        assert_eq!(shell("a\n$x"), "'a?$x'");
    }
}
