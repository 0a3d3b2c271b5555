//! What a program that does not end waits for.

use std::fmt::Write;
use std::fs::read_to_string;

/// Returns a line for each thread of a process and of all processes that it has started: its name,
/// its state, its times in user and kernel mode (in ticks), and the kernel's function in which it
/// waits.
pub fn threads(process: u32) -> String {
    let mut lines = String::new();
    let folder = format!("/proc/{process}/task");
    let Ok(entries) = std::fs::read_dir(&folder) else { return lines };
    for thread in entries.flatten() {
        let read = |file: &str| read_to_string(thread.path().join(file)).unwrap_or_default();
        let (id, stat) = (thread.file_name(), read("stat"));
        // The name, in parentheses, may have spaces.
        let fields: Vec<_> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
        let field = |at: usize| fields.get(at).copied().unwrap_or("?");
        let _ = writeln!(
            lines,
            "{process} {} {}: {}, {} + {} ticks, in {}",
            id.display(),
            read("comm").trim_end(),
            field(0),
            field(11),
            field(12),
            read("wchan")
        );
        for child in read("children").split_whitespace() {
            lines += &child.parse().map(threads).unwrap_or_default();
        }
    }
    lines
}
