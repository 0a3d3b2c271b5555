//! Signals that the caller of a program ignores, as `nohup` does. The program must ignore them too.

/// Returns those of `signals` that the caller does not ignore. Call it before the program handles
/// them.
pub fn not_ignored(signals: impl IntoIterator<Item = i32>) -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    signals.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}

/// Returns the set of ignored signals: bit N - 1 is signal N (proc_pid_status(5)).
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_of_ignored_signals_is_read() {
        assert_eq!(ignored("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t1\n"), 1 << 12 | 1);
        assert_eq!(ignored(""), 0);
        // Rust's start of a program ignores SIGPIPE, 13.
        assert_eq!(not_ignored([13, 15]), [15]);
    }
}
