//! A thread that logs stalls of reactors, with the task that causes each stall.
//!
//! In: the pulse of each reactor, which counts its iterations. Out: a log message for an iteration
//! that does not end, and another one when it has ended. What must hold: a reactor's only work for
//! the watchdog is to store which task it polls. While all reactors sleep, the watchdog sleeps too.
//! A stall causes one message, and the number of messages is limited.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_ring::sandbox::{self, Kind};
use blockyard_ring::{Pulse, Watcher};

use crate::log::{Budget, Withheld};

/// Time between two checks, and the number of checks in the same iteration that count as a stall:
/// more than a second. The watchdog counts checks and not time, because if the whole process was
/// stopped, no reactor has stalled.
const PERIOD: Duration = Duration::from_millis(400);
const CHECKS: u32 = 3;
/// Shortest time between two checks, if a report is due while a reactor stalls.
const SHORTEST: Duration = Duration::from_millis(10);

/// What the watchdog does while all reactors make progress, for a supervisor such as systemd.
pub struct Alive {
    /// Time between two reports.
    pub period: Duration,
    pub report: Box<dyn Fn() + Send>,
}

/// Watches the reactors from its own thread. Drop ends it.
pub struct Watchdog {
    watcher: Arc<Watcher>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to watch `reactors`, each with its name. Without `alive`, nothing is reported.
    pub fn start(
        reactors: Vec<(String, Arc<Pulse>)>,
        alive: Option<Alive>,
    ) -> std::io::Result<Self> {
        let (watcher, stop) = (Arc::new(Watcher::default()), Arc::new(AtomicBool::new(false)));
        reactors.iter().for_each(|(_, pulse)| pulse.watched_by(&watcher));
        let (watching, stopped) = (watcher.clone(), stop.clone());
        let body = move || {
            sandbox::confine(Kind::Watchdog);
            watch(&watching, &stopped, &reactors, alive.as_ref())
        };
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .stack_size(256 << 10)
            .spawn(body)?;
        Ok(Watchdog { watcher, stop, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.watcher.wake();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

fn watch(
    watcher: &Watcher,
    stop: &AtomicBool,
    reactors: &[(String, Arc<Pulse>)],
    alive: Option<&Alive>,
) {
    let mut reported = Instant::now();
    watcher.set_this_thread();
    let mut checks: Vec<_> = reactors.iter().map(|_| Observed::default()).collect();
    let budget = Budget::default();
    let stops = || stop.load(Ordering::SeqCst);
    while !stops() {
        let asleep = || !stops() && reactors.iter().all(|(_, pulse)| pulse.iteration().is_none());
        let mut all_asleep = true;
        for (observed, (name, pulse)) in checks.iter_mut().zip(reactors) {
            let iteration = pulse.iteration();
            all_asleep &= iteration.is_none();
            match observed.sees(iteration) {
                Some(Seen::Stalls) => {
                    if let Some(withheld) = budget.admit(Instant::now()) {
                        let (what, withheld) = (pulse.last_polled(), Withheld(withheld));
                        tracing::warn!(
                            "{name} stalls: one task has run for more than a second, \
                             and all disks of this reactor wait; it runs {what:?}{withheld}"
                        );
                        observed.reported = true;
                    }
                }
                Some(Seen::GoesOn { checks }) => {
                    let time = (PERIOD * checks).as_secs_f64();
                    tracing::warn!("{name} goes on after about {time:.1} s");
                }
                None => {}
            }
        }
        let stalls = checks.iter().any(Observed::stalls);
        if let Some(alive) = alive
            && !stalls
            && reported.elapsed() >= alive.period
        {
            (alive.report)();
            reported = Instant::now();
        }
        let limit = alive.map(|alive| alive.period.saturating_sub(reported.elapsed()));
        if all_asleep {
            watcher.rest(asleep, limit)
        } else {
            std::thread::park_timeout(limit.unwrap_or(PERIOD).min(PERIOD).max(SHORTEST))
        }
    }
}

/// The watchdog's observations of one reactor.
#[derive(Debug, Default)]
struct Observed {
    iteration: Option<u64>,
    /// Number of checks since the watchdog first saw this iteration.
    checks: u32,
    reported: bool,
}

#[derive(Debug, PartialEq)]
enum Seen {
    /// The iteration has lasted too long. This is reported once for each iteration.
    Stalls,
    /// An iteration that was reported has ended.
    GoesOn { checks: u32 },
}

impl Observed {
    /// Returns whether the iteration has lasted too long already.
    fn stalls(&self) -> bool {
        self.iteration.is_some() && self.checks >= CHECKS
    }

    /// Checks once. `iteration` is the iteration that the reactor is in, or `None` if it sleeps.
    fn sees(&mut self, iteration: Option<u64>) -> Option<Seen> {
        if iteration.is_some() && iteration == self.iteration {
            self.checks += 1;
            return (self.checks == CHECKS).then_some(Seen::Stalls);
        }
        let before = std::mem::replace(self, Observed { iteration, ..Observed::default() });
        before.reported.then_some(Seen::GoesOn { checks: before.checks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iteration_that_does_not_end_is_reported_once() {
        let mut observed = Observed::default();
        let mut sees = |iterations: &[u64]| {
            let seen: Vec<_> = iterations
                .iter()
                .filter_map(|iteration| observed.sees(Some(*iteration).filter(|t| t % 2 == 1)))
                .collect();
            observed.reported |= seen.contains(&Seen::Stalls);
            seen
        };
        assert_eq!(sees(&[1, 3, 5, 5, 5, 7, 7, 7]), [], "iterations that end in time");
        assert_eq!(sees(&[0; 10]), [], "sleep");
        assert_eq!(sees(&[9; 100]), [Seen::Stalls]);
        assert_eq!(sees(&[11]), [Seen::GoesOn { checks: 99 }]);
        assert_eq!(sees(&[11, 13, 13, 13, 13]), [Seen::Stalls]);
        assert_eq!(
            sees(&[0]),
            [Seen::GoesOn { checks: 3 }],
            "a reactor that sleeps has ended its iteration"
        );
        assert_eq!(sees(&[13, 0, 13, 0]), []);
        assert!(PERIOD * CHECKS >= Duration::from_secs(1));
    }

    #[test]
    fn a_watchdog_ends_while_it_sleeps_and_while_it_watches() {
        for awake in [false, true] {
            let executor = blockyard_ring::Executor::new().unwrap();
            let pulse = executor.handle().pulse().clone();
            let reactors = vec![("reactor-0".to_string(), pulse)];
            if awake {
                executor
                    .block_on(async move { drop(Watchdog::start(reactors, None).unwrap()) })
                    .unwrap();
            } else {
                drop(Watchdog::start(reactors, None).unwrap());
            }
        }
    }
}
