//! The sandbox of a server: which files it may open, and which system calls its threads may make.
//!
//! ```text
//!   folders   Landlock: the folders that the process may use
//!   reserved  the files of the configuration and programs, which no disk may use
//!   calls     seccomp: the system calls of each kind of thread
//!   trap      the end of the process at a system call that is refused
//! ```
//!
//! In: folders and what the server does in them. Out: a process that the kernel confines.
//!
//! What must hold
//! - [`enter`] runs before the process starts threads. Both restrictions belong to a thread, and
//!   new threads inherit them.
//! - Reactors and the threads that open images cannot write into the folders of the configuration.
//!   Threads of the API can.
//! - A thread of a stricter kind calls [`confine`] at its start. It starts no threads itself: new
//!   threads come from the thread of [`threads`](crate::offload::threads), which is not as strict.
//! - Nothing here changes the process if the sandbox is off.

mod arguments;
mod calls;
mod folders;
mod reserved;
mod trap;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use calls::Kind;
pub use folders::{Access, Folder};
use folders::{Granted, Withheld};
pub use reserved::{Reserved, is_reserved, is_reserved_file, reserve};
pub use trap::STATUS;

/// The folders of a sandbox that is on. `None`: the kernel does not enforce them.
static GRANTED: OnceLock<Option<Granted>> = OnceLock::new();

/// What [`withhold`] restricts a thread to. Unset: it has nothing to withhold.
static WITHHELD: OnceLock<Withheld> = OnceLock::new();

/// Confines this process for good. Returns what the kernel cannot enforce, one sentence each.
pub fn enter(folders: Vec<Folder>) -> io::Result<Vec<String>> {
    let mut lacks = Vec::new();
    trap::install()?;
    let withheld = Withheld::of(&folders)?;
    let is_enforced = folders::restrict(&folders, &mut lacks)?;
    if let Some(withheld) = withheld.filter(|_| is_enforced) {
        let _ = WITHHELD.set(withheld);
    }
    if let Err(e) = calls::apply(Kind::Any) {
        lacks.push(format!("the kernel has no filters for system calls (seccomp): {e}"));
    }
    crate::offload::threads::start(withhold)?;
    let _ = GRANTED.set(is_enforced.then(|| Granted::new(&folders)));
    Ok(lacks)
}

/// Returns whether the sandbox is on.
pub fn is_on() -> bool {
    GRANTED.get().is_some()
}

/// Takes the folders of [`Access::Control`] from the calling thread, and from threads that it
/// starts. Does nothing if the sandbox is off.
pub(crate) fn withhold() {
    if let Some(Err(e)) = WITHHELD.get().map(Withheld::restrict) {
        tracing::warn!("sandbox: this thread may write into the folder of the configuration: {e}");
    }
}

/// Restricts the calling thread to the system calls of its kind, and a reactor also to fewer
/// folders. Does nothing if the sandbox is off.
pub fn confine(kind: Kind) {
    if kind == Kind::Reactor {
        withhold();
    }
    if is_on()
        && let Err(e) = calls::apply(kind)
    {
        // `enter` has warned if the kernel has no filters.
        tracing::debug!("sandbox: no filter for this thread: {e}");
    }
}

/// Restricts a process of one thread to the system calls of a kind, whether or not it is a server.
pub fn confine_process(kind: Kind) -> io::Result<()> {
    trap::install()?;
    calls::apply(kind)
}

/// Returns the folder of a file if the sandbox refuses it. Returns `None` if the sandbox is off.
pub fn refused_folder(path: &Path) -> Option<PathBuf> {
    GRANTED.get()?.as_ref()?.refused(path)
}

/// Returns whether the sandbox lets the process create a socket at `path`.
pub fn may_listen(path: &Path) -> bool {
    let granted = GRANTED.get().and_then(Option::as_ref);
    granted.is_none_or(|granted| granted.may_listen(path))
}

/// Returns what to do about a file that the sandbox refuses, as the end of a message.
pub fn advice(path: &Path) -> Option<String> {
    refused_folder(path).map(|folder| {
        let folder = folder.display();
        format!(
            "the sandbox refuses folder {folder}: start the server with --allow-folder {folder}"
        )
    })
}

#[cfg(test)]
mod tests;
