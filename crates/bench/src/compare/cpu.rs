//! CPU time of whole trees of processes, and of the host kernel's threads, from /proc.

use std::collections::HashMap;

/// CPU time so far, in clock ticks.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// For each process ID: the parent, whether the process is a thread of the kernel, its ticks,
    /// and the ticks of children that it has waited for.
    processes: HashMap<u32, (u32, bool, u64, u64)>,
}

impl Snapshot {
    pub fn take() -> Self {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        let stat = |pid: u32| {
            Some((pid, parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?))
        };
        Snapshot { processes: pids.filter_map(stat).collect() }
    }

    /// Returns the CPU seconds of a process and its descendants, with ended ones that were waited
    /// for.
    pub fn tree(&self, root: u32) -> f64 {
        let mut ticks = 0;
        let mut open = vec![root];
        while let Some(pid) = open.pop() {
            if let Some((_, _, own, waited)) = self.processes.get(&pid) {
                ticks += own + waited;
            }
            open.extend(self.processes.iter().filter(|(_, p)| p.0 == pid).map(|(child, _)| *child));
        }
        seconds(ticks)
    }

    /// Returns the CPU seconds of the kernel's own threads since `before` (workers of io_uring
    /// belong to their processes). The CPU time of processes that have ended meanwhile is unknown.
    pub fn kernel_since(&self, before: &Snapshot) -> f64 {
        let old = |pid| before.processes.get(pid).map_or(0, |p| p.2);
        seconds(
            self.processes
                .iter()
                .filter(|(_, p)| p.1)
                .map(|(pid, p)| p.2.saturating_sub(old(pid)))
                .sum(),
        )
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// proc(5): parent is field 4, flags 9, user and system time 14 and 15, those of waited-for
/// children 16 and 17.
fn parse(stat: &str) -> Option<(u32, bool, u64, u64)> {
    const PF_KTHREAD: u64 = 0x0020_0000;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at - 3)?.parse::<u64>().ok();
    let flags = number(9)?;
    Some((
        number(4)? as u32,
        flags & PF_KTHREAD != 0,
        number(14)? + number(15)?,
        number(16)? + number(17)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_its_processes() {
        let text = "12 (a) b (c) S 1 12 12 0 -1 4194560 100 0 0 0 250 50 7 3 20 0 3 0 1000";
        assert_eq!(parse(text), Some((1, false, 300, 10)));
        assert!(parse("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 1 2 0 0 20 0 1 0 1").unwrap().1);
        let before = Snapshot::take();
        let mut child =
            std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let own = |s: &Snapshot| s.tree(std::process::id());
        let begin = std::time::Instant::now();
        while own(&Snapshot::take()) - own(&before) < 0.1 {
            assert!(begin.elapsed().as_secs() < 60, "a busy child is not counted");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
