//! Work that the reactor does itself although it may block, if [`Pauses`] allows it.

use std::time::Instant;

use crate::host;
use crate::policy::pauses::Pauses;

/// Does the work, unless [`Pauses`] forbids it now.
pub fn attempt<T>(pauses: &Pauses, work: impl FnOnce() -> T) -> Option<T> {
    let began = Instant::now();
    if !pauses.allows(began) {
        return None;
    }
    let switches = host::voluntary_switches();
    let done = work();
    pauses.done(began, Instant::now(), || host::voluntary_switches() != switches);
    Some(done)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The work waits for another thread, which answers after 100 ms. That is long enough to count
    /// as blocked.
    #[test]
    fn work_is_not_attempted_after_it_blocked() {
        let pauses = Pauses::default();
        assert_eq!(attempt(&pauses, || 7), Some(7));
        let (asked, asks) = mpsc::channel::<Instant>();
        let (answer, answers) = mpsc::channel();
        let other = std::thread::spawn(move || {
            let began = asks.recv().unwrap();
            while began.elapsed().as_millis() < 100 {
                std::thread::yield_now();
            }
            answer.send(()).unwrap();
        });
        let work = || {
            asked.send(Instant::now()).unwrap();
            answers.recv().unwrap();
        };
        assert_eq!(attempt(&pauses, work), Some(()));
        assert_eq!(attempt(&pauses, || 8), None, "a pause of 2 s");
        other.join().unwrap();
    }
}
