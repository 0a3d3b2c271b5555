//! A thread that names what stalls a reactor.
//!
//! In: the pulse of each reactor. Out: a log message for a turn that does not end, and another one
//! when it has ended. What must hold: reactors do nothing for it but store what they are at; while
//! all of them sleep, it sleeps, too; a stall is one message, and many stalls are few.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_ring::{Pulse, Watcher};

use crate::log::{Budget, Withheld};

/// Time between two looks, and looks that see the same turn before it is a stall: more than a
/// second. Looks are counted, and not the time: a process that stood still as a whole has no
/// stalled reactor.
const PERIOD: Duration = Duration::from_millis(400);
const LOOKS: u32 = 3;

pub struct Watchdog {
    watcher: Arc<Watcher>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches reactors, by name.
    pub fn start(reactors: Vec<(String, Arc<Pulse>)>) -> std::io::Result<Self> {
        let (watcher, stop) = (Arc::new(Watcher::default()), Arc::new(AtomicBool::new(false)));
        reactors.iter().for_each(|(_, pulse)| pulse.watched_by(&watcher));
        let (watching, stopped) = (watcher.clone(), stop.clone());
        let body = move || watch(&watching, &stopped, &reactors);
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

fn watch(watcher: &Watcher, stop: &AtomicBool, reactors: &[(String, Arc<Pulse>)]) {
    watcher.is_this_thread();
    let mut looks: Vec<_> = reactors.iter().map(|_| Look::default()).collect();
    let budget = Budget::default();
    let stops = || stop.load(Ordering::SeqCst);
    while !stops() {
        let asleep = || !stops() && reactors.iter().all(|(_, pulse)| pulse.iteration().is_none());
        let mut all_asleep = true;
        for (look, (name, pulse)) in looks.iter_mut().zip(reactors) {
            let turn = pulse.iteration();
            all_asleep &= turn.is_none();
            match look.sees(turn) {
                Some(Seen::Stalls) => {
                    if let Some(withheld) = budget.admit(Instant::now()) {
                        let (what, withheld) = (pulse.last_polled(), Withheld(withheld));
                        tracing::warn!(
                            "{name} stalls: it has been at one thing for more than a second, all its disks wait; it is at {what:?}{withheld}"
                        );
                        look.reported = true;
                    }
                }
                Some(Seen::GoesOn { looks }) => {
                    let time = (PERIOD * looks).as_secs_f64();
                    tracing::warn!("{name} goes on, after about {time:.1} s");
                }
                None => {}
            }
        }
        if all_asleep { watcher.rest(asleep) } else { std::thread::park_timeout(PERIOD) }
    }
}

/// What was seen of one reactor.
#[derive(Debug, Default)]
struct Look {
    turn: Option<u64>,
    /// Looks since that turn was seen first.
    looks: u32,
    reported: bool,
}

#[derive(Debug, PartialEq)]
enum Seen {
    /// Told once for a turn.
    Stalls,
    /// A turn that was reported has ended.
    GoesOn { looks: u32 },
}

impl Look {
    /// One look: the turn that the reactor is in, or None if it sleeps.
    fn sees(&mut self, turn: Option<u64>) -> Option<Seen> {
        if turn.is_some() && turn == self.turn {
            self.looks += 1;
            return (self.looks == LOOKS).then_some(Seen::Stalls);
        }
        let before = std::mem::replace(self, Look { turn, ..Look::default() });
        before.reported.then_some(Seen::GoesOn { looks: before.looks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_that_does_not_end_is_told_once() {
        let mut look = Look::default();
        let mut sees = |turns: &[u64]| {
            let seen: Vec<_> = turns
                .iter()
                .filter_map(|turn| look.sees(Some(*turn).filter(|t| t % 2 == 1)))
                .collect();
            look.reported |= seen.contains(&Seen::Stalls);
            seen
        };
        assert_eq!(sees(&[1, 3, 5, 5, 5, 7, 7, 7]), [], "turns that end in time");
        assert_eq!(sees(&[0; 10]), [], "sleep");
        assert_eq!(sees(&[9; 100]), [Seen::Stalls]);
        assert_eq!(sees(&[11]), [Seen::GoesOn { looks: 99 }]);
        assert_eq!(sees(&[11, 13, 13, 13, 13]), [Seen::Stalls]);
        assert_eq!(sees(&[0]), [Seen::GoesOn { looks: 3 }], "it sleeps: it went on");
        assert_eq!(sees(&[13, 0, 13, 0]), []);
        assert!(PERIOD * LOOKS >= Duration::from_secs(1));
    }

    #[test]
    fn a_watchdog_ends_while_it_rests_and_while_it_watches() {
        for awake in [false, true] {
            let executor = blockyard_ring::Executor::new().unwrap();
            let pulse = executor.handle().pulse().clone();
            let reactors = vec![("reactor-0".to_string(), pulse)];
            if awake {
                executor.block_on(async move { drop(Watchdog::start(reactors).unwrap()) }).unwrap();
            } else {
                drop(Watchdog::start(reactors).unwrap());
            }
        }
    }
}
