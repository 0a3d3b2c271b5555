//! Clocks of the kernel that the standard library does not have.
//!
//! Not by rustix: it panics if the vDSO lacks a function, as that of User Mode Linux does.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The processor time of the calling thread. The time in which other threads had its processor
    /// does not count.
    Thread,
    /// The processor time of the process.
    Process,
    Monotonic,
    /// The time of the last tick of the kernel. Reading it is no system call.
    CoarseMonotonic,
    /// The time since 1970 at the last tick of the kernel, by which a file's mtime is set.
    CoarseRealtime,
}

impl Clock {
    #[inline]
    pub fn read(self) -> Duration {
        let clock = match self {
            Clock::Thread => libc::CLOCK_THREAD_CPUTIME_ID,
            Clock::Process => libc::CLOCK_PROCESS_CPUTIME_ID,
            Clock::Monotonic => libc::CLOCK_MONOTONIC,
            Clock::CoarseMonotonic => libc::CLOCK_MONOTONIC_COARSE,
            Clock::CoarseRealtime => libc::CLOCK_REALTIME_COARSE,
        };
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes one timespec, which outlives the call.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_agree_with_those_of_the_standard_library() {
        use std::time::{Instant, SystemTime, UNIX_EPOCH};
        let (begin, real) = (Instant::now(), SystemTime::now());
        let (thread, process) = (Clock::Thread.read(), Clock::Process.read());
        let (coarse, monotonic) = (Clock::CoarseMonotonic.read(), Clock::Monotonic.read());
        assert!(thread <= process && coarse <= monotonic, "{thread:?} {process:?}");
        let since = real.duration_since(UNIX_EPOCH).unwrap();
        let tick = Clock::CoarseRealtime.read();
        assert!(tick + Duration::from_secs(1) > since, "{tick:?} {since:?}");
        let passed = Clock::Monotonic.read() - monotonic;
        assert!(passed <= begin.elapsed());
    }
}
