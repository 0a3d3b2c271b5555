//! Limits log lines that a peer can cause at any rate: a guest, a front end, a caller of the API.
//!
//! In: the time of a line. Out: whether it may be written. What must hold: the log grows slowly at
//! any rate of lines, and says how many were suppressed.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of lines that may be written at once, and the time after which one more may be written.
const BURST: u32 = 10;
const PAUSE: Duration = Duration::from_secs(10);

/// A limit on the rate of log lines: a burst of [`BURST`] lines, and then one line in each
/// [`PAUSE`].
#[derive(Debug, Default)]
pub struct Budget(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of lines of the burst that are used up. Each pause makes one line available again.
    spent: u32,
    /// Time when a line last became available again.
    since: Option<Instant>,
    withheld: u64,
}

impl Budget {
    /// Returns the number of lines suppressed since the last written one, if a line may be written
    /// now. Returns `None` if no line may be written now.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = *state.since.get_or_insert(now);
        let returned = now.saturating_duration_since(since).as_secs() / PAUSE.as_secs();
        if returned > 0 {
            state.spent = state.spent.saturating_sub(u32::try_from(returned).unwrap_or(u32::MAX));
            state.since = Some(now);
        }
        if state.spent < BURST {
            state.spent += 1;
            return Some(std::mem::take(&mut state.withheld));
        }
        state.withheld += 1;
        None
    }
}

/// Displays the number of suppressed lines, or nothing for 0.
pub struct Withheld(pub u64);

impl std::fmt::Display for Withheld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 > 0 {
            write!(f, " ({} lines were left out before this one)", self.0)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_writes_a_burst_and_then_one_line_for_each_pause() {
        let (budget, start) = (Budget::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let written = |from: u64, to: u64| {
            (from..to).filter_map(|ms| budget.admit(at(ms))).collect::<Vec<_>>()
        };
        assert_eq!(written(0, 9_999), [0; BURST as usize]);
        assert_eq!(written(10_000, 30_000), [9_989, 9_999]);
        // After a long silence the whole burst is available again.
        assert_eq!(written(1_000_000, 1_000_100).len(), BURST as usize);
    }
}
