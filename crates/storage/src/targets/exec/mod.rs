//! `exec:` images: a map in another program.
//!
//! ```text
//!   protocol   the lines that both sides send
//!   start      starts the program, and reads what it says at its start
//!   program    asks the running program
//!   handed     moves a running program to another server
//! ```
//!
//! In: `exec:/path/of/program`. Out: a [`Target`](super::Target); the program is its map. The data
//! stay in Blockyard: the program only says where they lie.
//!
//! What must hold
//! - A program that hangs, ends or sends nonsense costs its own disk I/O errors, bounded memory,
//!   and a line in the log.
//! - Only the operator names programs. An image that names one as its backing file is refused.
//! - In a hand-over the program serves one of two servers: the owner, see [`continue_from`].
//! - A server in a sandbox starts no program: it starts them before, see [`start_early`].

mod handed;
mod process;
mod program;
mod protocol;
mod start;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

pub use start::{continue_from, end_unused, start_early};

use crate::error::{ErrorKind, StorageError};
use crate::opened::{OpenOptions, Opened};
use crate::scheme::{Scheme, StorageScheme};

const PREFIX: &str = "exec:";

/// Names of programs.
pub(crate) struct ExecScheme;

/// Returns the path of the program, if the name has the form `exec:/path`.
fn program_of(name: &str) -> Option<PathBuf> {
    let path = name.strip_prefix(PREFIX)?;
    path.starts_with('/').then(|| path.into())
}

fn refused(kind: ErrorKind, what: impl Into<String>) -> StorageError {
    StorageError { kind, source: what.into().into() }
}

impl Scheme for ExecScheme {
    fn forms(&self) -> &'static str {
        "exec:/path/of/program"
    }

    fn owns(&self, name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    /// Only one server may ask a program.
    fn may_move(&self) -> bool {
        false
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn program(&self, name: &str) -> Option<PathBuf> {
        program_of(name)
    }
}

impl StorageScheme for ExecScheme {
    fn open(&self, name: &str, options: &OpenOptions) -> Result<Arc<dyn Opened>, StorageError> {
        let started = start::take(name)?;
        let target = started.target(name, options.read_only);
        Ok(target.open(options.cache)?)
    }

    /// Fails always: only images refer to normalized names, and no image may name a program.
    fn normalize(&self, _name: &str) -> Result<String, StorageError> {
        Err(refused(ErrorKind::Refused, "an image may not name a program to start"))
    }

    fn permit(&self, _allowed: &str, _name: &str) -> Option<String> {
        None
    }
}
