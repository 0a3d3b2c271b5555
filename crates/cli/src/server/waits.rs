//! Commands that wait for storage, and exclude others meanwhile.
//!
//! In: a command that waits, and its disk. Out: for what it waits and since when, for the messages
//! of commands that it excludes; and whether its wait is over, because an upgrade or a reload needs
//! what it excludes. What must hold: a wait ends early only if its disk comes to no harm: it goes
//! on opening, or stays as it is. The end of a disk is awaited, because the command may have to
//! open it again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_program::output::shell;

/// Shortest wait that ends early. Storage that answers needs less.
const LEAST: Duration = Duration::from_secs(2);

struct Wait {
    disk: String,
    what: &'static str,
    since: Instant,
}

#[derive(Default)]
struct State {
    waits: BTreeMap<u64, Wait>,
    count: u64,
    /// Number of commands that cannot begin before the waits end.
    hurries: usize,
}

/// The waits of a server; see the module documentation.
#[derive(Default)]
pub struct Waits(Mutex<State>);

impl Waits {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a wait until the returned value is dropped. `what`: what the disk does meanwhile.
    pub fn list(&self, disk: &str, what: &'static str) -> Listed<'_> {
        self.list_since(disk, what, Instant::now())
    }

    /// Like `list`, for work that has begun before the wait: of disks that open at the same time,
    /// only the first one needs the shortest wait.
    pub fn list_since(&self, disk: &str, what: &'static str, since: Instant) -> Listed<'_> {
        let mut state = self.state();
        state.count += 1;
        let number = state.count;
        state.waits.insert(number, Wait { disk: disk.into(), what, since });
        Listed { waits: self, number, since }
    }

    /// Ends the waits that last long already, until the returned value is dropped.
    pub fn hurry(&self) -> Hurry<'_> {
        self.state().hurries += 1;
        Hurry(self)
    }

    pub fn are_there(&self) -> bool {
        !self.state().waits.is_empty()
    }

    /// Says for which disk a command waits longest, as the end of a message. Empty if none does.
    pub fn describe(&self) -> String {
        let state = self.state();
        let Some(wait) = state.waits.values().min_by_key(|wait| wait.since) else {
            return String::new();
        };
        let Wait { disk, what, since } = wait;
        let (seconds, command) = (since.elapsed().as_secs(), shell(disk));
        format!(
            ": it has waited for {seconds} s for the storage of disk \"{disk}\", which {what} \
             (`ctl show {command}`)"
        )
    }
}

/// A wait of a command.
pub struct Listed<'a> {
    waits: &'a Waits,
    number: u64,
    since: Instant,
}

impl Listed<'_> {
    /// Returns whether the wait ends now, because another command needs that.
    pub fn is_over(&self) -> bool {
        self.is_over_after(LEAST)
    }

    fn is_over_after(&self, least: Duration) -> bool {
        self.waits.state().hurries > 0 && self.since.elapsed() >= least
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.waits.state().waits.remove(&self.number);
    }
}

/// A command that cannot begin before the waits end.
pub struct Hurry<'a>(&'a Waits);

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.state().hurries -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_named_and_ends_if_another_command_needs_that() {
        let waits = Waits::default();
        assert!(!waits.are_there() && waits.describe().is_empty());
        let (first, second) = (waits.list("a b", "is opening"), waits.list("c", "is closing"));
        let why = waits.describe();
        assert!(why.contains("disk \"a b\", which is opening (`ctl show 'a b'`)"), "{why}");
        assert!(!first.is_over_after(Duration::ZERO));
        let hurry = waits.hurry();
        assert!(first.is_over_after(Duration::ZERO) && second.is_over_after(Duration::ZERO));
        assert!(!first.is_over_after(Duration::from_secs(3600)), "storage may be only slow");
        drop(hurry);
        assert!(!first.is_over_after(Duration::ZERO));
        drop(first);
        assert!(waits.describe().contains("\"c\""));
        drop(second);
        assert!(!waits.are_there());
    }
}
