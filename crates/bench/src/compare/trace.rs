//! The lines of a script: its marks by two clocks, its blocks of data, and other lines.
//!
//! In: lines with the times at which the host received them. Out: the time between the marks
//! `begin` and `end`, by the host's clock and by the guest's, and the ratio of both. What must
//! hold: a line inside a block of data is no mark.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context, Result};

use super::cpu::Snapshot;

/// Shortest run in seconds of the guest's clock that measures this clock.
const LONG: f64 = 1.0;

struct Mark {
    name: String,
    came: Instant,
    /// The guest's clock in microseconds.
    clock: u64,
    cpu: Snapshot,
}

pub struct Trace<'a> {
    started: Instant,
    before: Snapshot,
    marks: Vec<Mark>,
    data: HashMap<String, Vec<String>>,
    /// Name of the block of data that has begun.
    inside: Option<String>,
    /// Lines that are neither marks nor data.
    said: &'a mut Vec<String>,
}

/// The measured part of a script.
#[derive(Debug)]
pub struct Measured {
    /// Duration by the host's clock.
    pub seconds: f64,
    pub guest_seconds: f64,
    /// Marks after `begin`, with the seconds since the mark before.
    pub steps: Vec<(String, f64)>,
    /// CPU time at the beginning and at the end.
    pub begin: Snapshot,
    pub end: Snapshot,
    pub data: HashMap<String, Vec<String>>,
}

impl<'a> Trace<'a> {
    /// `started`, `before`: the start of the script or of its guest, and the CPU time then.
    pub fn new(started: Instant, before: Snapshot, said: &'a mut Vec<String>) -> Self {
        let (marks, data) = (Vec::new(), HashMap::new());
        Trace { started, before, marks, data, inside: None, said }
    }

    /// Takes a line. `cpu` returns the CPU time so far. A mark needs it.
    pub fn take(&mut self, came: Instant, line: String, cpu: fn() -> Snapshot) -> Result<()> {
        let words: Vec<&str> = line.split(' ').collect();
        match (&words[..], &mut self.inside) {
            (["end", name], Some(block)) if name == block => self.inside = None,
            (_, Some(block)) => self.data.entry(block.clone()).or_default().push(line),
            (["mark", name, clock], None) => {
                let clock =
                    clock.parse().with_context(|| format!("a mark without a clock: {line}"))?;
                self.marks.push(Mark { name: name.to_string(), came, clock, cpu: cpu() });
            }
            (["data", name], None) => self.inside = Some(name.to_string()),
            _ => self.said.push(line),
        }
        Ok(())
    }

    /// Returns the measured part, or `None` if the script has not printed its marks.
    pub fn measured(mut self) -> Option<Measured> {
        let has_begin = self.marks.iter().any(|mark| mark.name == "begin");
        if !has_begin {
            self.begin_with_the_guest();
        }
        let from = self.marks.iter().position(|mark| mark.name == "begin")?;
        let to = self.marks.iter().position(|mark| mark.name == "end").filter(|to| *to > from)?;
        let since = |a: &Mark, b: &Mark| (b.came - a.came).as_secs_f64();
        let pairs = self.marks[from..to].windows(2);
        let steps = pairs.map(|pair| (pair[1].name.clone(), since(&pair[0], &pair[1]))).collect();
        let (begin, end) = (&self.marks[from], &self.marks[to]);
        Some(Measured {
            seconds: since(begin, end),
            guest_seconds: end.clock.saturating_sub(begin.clock) as f64 / 1e6,
            steps,
            begin: begin.cpu.clone(),
            end: end.cpu.clone(),
            data: self.data,
        })
    }

    /// Adds the mark `begin`: the measured time of a script without one begins with the guest.
    fn begin_with_the_guest(&mut self) {
        let clock = self.marks.first().map_or(0, |first| {
            first.clock.saturating_sub((first.came - self.started).as_micros() as u64)
        });
        let (came, cpu) = (self.started, std::mem::take(&mut self.before));
        self.marks.insert(0, Mark { name: "begin".into(), came, clock, cpu });
    }
}

impl Measured {
    /// Returns the ratio of the host's clock to the guest's. The host may receive the lines of
    /// marks some milliseconds late, which would distort the ratio of a short run: it is 1 then.
    pub fn clock(&self) -> f64 {
        if self.guest_seconds >= LONG { self.seconds / self.guest_seconds } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Feeds lines, each with the milliseconds since the start at which the host received it.
    fn traced(lines: &[(u64, &str)]) -> (Result<Option<Measured>>, Vec<String>) {
        let (started, mut said) = (Instant::now(), Vec::new());
        let mut trace = Trace::new(started, Snapshot::default(), &mut said);
        let taken = lines.iter().try_for_each(|(at, line)| {
            trace.take(started + Duration::from_millis(*at), line.to_string(), Snapshot::default)
        });
        let measured = taken.map(|()| trace.measured());
        (measured, said)
    }

    fn measured(lines: &[(u64, &str)]) -> Measured {
        traced(lines).0.unwrap().unwrap()
    }

    #[track_caller]
    fn near(found: f64, value: f64) {
        assert!((found - value).abs() < 1e-9, "{found} instead of {value}");
    }

    /// A User Mode Linux guest has printed these marks, and the host received them at these times.
    /// Between them are a dd of 8 MiB and a loop of two seconds.
    #[test]
    fn a_recorded_run_has_about_the_same_time_by_both_clocks() {
        let run = measured(&[
            (447, "mark begin 1796090771300751"),
            (473, "mark dd 1796090771327577"),
            (2144, "mark end 1796090773003010"),
            (2145, "data samples"),
            (2145, "512 0.000412"),
            (2145, "end samples"),
        ]);
        near(run.seconds, 1.697);
        near(run.guest_seconds, 1.702259);
        near(run.clock(), 1.697 / 1.702259);
        assert_eq!(run.data["samples"], ["512 0.000412"]);
        assert_eq!((run.steps.len(), &*run.steps[0].0), (1, "dd"));
        near(run.steps[0].1, 0.026);
    }

    #[test]
    fn the_ratio_of_the_clocks_corrects_a_guest_with_a_slow_clock() {
        // Five seconds of the host are two of the guest.
        let slow = measured(&[(1000, "mark begin 7000000"), (6000, "mark end 9000000")]);
        near(slow.guest_seconds, 2.0);
        near(slow.clock(), 2.5);
        // A run of 0.9 s is too short for a ratio.
        let short = measured(&[(1000, "mark begin 7000000"), (6000, "mark end 7900000")]);
        near(short.clock(), 1.0);
        // A clock that was set back gives no negative time.
        let back = measured(&[(0, "mark begin 9000000"), (3000, "mark end 7000000")]);
        near(back.guest_seconds, 0.0);
        near(back.clock(), 1.0);
    }

    #[test]
    fn each_mark_between_begin_and_end_is_a_step() {
        let run = measured(&[
            (100, "mark begin 5000000"),
            (1300, "mark dd 6200000"),
            (1800, "mark dd-sync 6700000"),
            (2000, "mark end 6900000"),
            (9000, "mark late 9900000"),
        ]);
        let names: Vec<_> = run.steps.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["dd", "dd-sync"]);
        near(run.steps[0].1, 1.2);
        near(run.steps[1].1, 0.5);
        near(run.seconds, 1.9);
    }

    #[test]
    fn a_script_without_a_mark_begin_is_measured_from_the_start_of_its_guest() {
        let run = measured(&[(1500, "mark up 41500000"), (4000, "mark end 44000000")]);
        near(run.seconds, 4.0);
        near(run.guest_seconds, 4.0);
        assert_eq!(run.steps[0].0, "up");
        near(run.steps[0].1, 1.5);
    }

    #[test]
    fn lines_of_data_are_no_marks_and_other_lines_are_what_the_script_says() {
        let (run, said) = traced(&[
            (0, "mark begin 1000000"),
            (1, "data log"),
            (2, "mark end 2000000"),
            (3, "end samples"),
            (4, "data inner"),
            (5, "end log"),
            (6, "mounting /dev/vda"),
            (7, "mark end 3000000"),
            (8, "mark of a kind"),
        ]);
        let run = run.unwrap().unwrap();
        near(run.guest_seconds, 2.0);
        assert_eq!(run.data["log"], ["mark end 2000000", "end samples", "data inner"]);
        assert_eq!(said, ["mounting /dev/vda", "mark of a kind"]);
    }

    #[test]
    fn a_script_that_fails_has_no_measured_part_and_what_it_said_is_kept() {
        let (run, said) = traced(&[(0, "mark begin 1000000"), (5, "mount: no such device")]);
        assert!(run.unwrap().is_none());
        assert_eq!(said, ["mount: no such device"]);
        // The marks are in the wrong order.
        let (run, _) = traced(&[(0, "mark end 1000000"), (5, "mark begin 2000000")]);
        assert!(run.unwrap().is_none());
        let (run, said) = traced(&[(0, "begin"), (5, "mark begin soon")]);
        let error = run.unwrap_err().to_string();
        assert!(error.contains("a mark without a clock: mark begin soon"), "{error}");
        assert_eq!(said, ["begin"]);
    }
}
