//! Lines in the log that a guest or a front end can cause as often as it likes.
//!
//! What must hold: however often they come, the log grows slowly, and what is written tells how
//! much was not. News and warnings are counted apart, so that a front end which comes and goes does
//! not hide what is wrong.

use std::fmt::Arguments;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Lines written as they come, and the pause after which one more may be.
const BURST: u32 = 10;
const PAUSE: Duration = Duration::from_secs(10);

/// One disk's lines.
#[derive(Debug, Default)]
pub struct Log {
    news: Budget,
    warnings: Budget,
}

impl Log {
    pub fn info(&self, disk: &str, queue: Option<u16>, what: Arguments<'_>) {
        if let Some(withheld) = self.news.admit(Instant::now()) {
            tracing::info!(disk, queue, "{what}{}", Withheld(withheld));
        }
    }

    pub fn warn(&self, disk: &str, queue: Option<u16>, what: Arguments<'_>) {
        if let Some(withheld) = self.warnings.admit(Instant::now()) {
            tracing::warn!(disk, queue, "{what}{}", Withheld(withheld));
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Budget(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Lines written of the burst, less what the time has given back.
    spent: u32,
    /// When the time last gave one back.
    since: Option<Instant>,
    withheld: u64,
}

impl Budget {
    /// Whether a line may be written now: then how many were not, since the last one.
    pub(crate) fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let since = *state.since.get_or_insert(now);
        let back = now.saturating_duration_since(since).as_secs() / PAUSE.as_secs();
        if back > 0 {
            state.spent = state.spent.saturating_sub(u32::try_from(back).unwrap_or(u32::MAX));
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

pub(crate) struct Withheld(pub u64);

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
    fn a_flood_leaves_a_burst_and_then_one_line_a_pause() {
        let (budget, start) = (Budget::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let written = |from: u64, to: u64| {
            (from..to).filter_map(|ms| budget.admit(at(ms))).collect::<Vec<_>>()
        };
        assert_eq!(written(0, 9_999), [0; BURST as usize]);
        assert_eq!(written(10_000, 30_000), [9_989, 9_999]);
        // After a long silence the burst is there again.
        assert_eq!(written(1_000_000, 1_000_100).len(), BURST as usize);
    }
}
