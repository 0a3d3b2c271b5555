//! `blockyard ctl events`: one line for each event.

use std::io::{self, Write};

use anyhow::anyhow;
use blockyard_control::client::{CallError, follow};
use blockyard_control::events::{Event, What};
use blockyard_control::types::{Job, JobState};
use blockyard_program::output::OutputError;

use super::CtlOptions;
use crate::changes::describe;

/// Prints the events of a server until it ends.
pub fn print(options: &CtlOptions, since: Option<&str>) -> anyhow::Result<()> {
    let each = |event: Event| {
        let line = if options.json { serde_json::to_string(&event)? } else { line(&event) };
        let mut out = io::stdout().lock();
        writeln!(out, "{line}").and_then(|()| out.flush())
    };
    follow(&options.api, since, options.timeout, each).map_err(|e| match e {
        CallError::Handling(e) => OutputError::from(e).into(),
        e => anyhow!(e),
    })
}

/// Returns an event as one line for people. Control characters do not reach the terminal.
fn line(event: &Event) -> String {
    let (name, disk, what) = words(&event.what);
    let text = format!("{}  {name:<20}  {disk:<12}  {what}", utc(event.time_us));
    blockyard_ring::text::clean(text.trim_end())
}

/// Returns the name of an event, its disk, and what it says.
fn words(what: &What) -> (&'static str, &str, String) {
    let flat = |error: &Option<String>, good: &str| match error {
        Some(error) => format!("failed: {error}"),
        None => good.to_string(),
    };
    let client = |export: &str, client: &str, program: &Option<String>| match program {
        Some(program) => format!("{client} ({program}) by {export}"),
        None => format!("{client} by {export}"),
    };
    match what {
        What::ServerReady { disks } => ("server-ready", "", format!("{disks} disks")),
        What::ServerEnding => ("server-ending", "", String::new()),
        What::DiskAdded { disk, images, size, exports } => {
            ("disk-added", disk, format!("{images}, {size} bytes, on {}", exports.join(" and ")))
        }
        What::DiskRemoved { disk, error: Some(error), .. } => {
            ("disk-removed", disk, format!("an export could not start: {error}"))
        }
        What::DiskRemoved { disk, flushed, .. } => {
            let what = if *flushed { "flushed" } else { "writes may be lost: see the log" };
            ("disk-removed", disk, what.into())
        }
        What::DiskFailed { disk, image, error } => {
            ("disk-failed", disk, format!("image {image} is not served: {error}"))
        }
        What::DiskChanged { disk, keys } => ("disk-changed", disk, describe(keys)),
        What::DiskResized { disk, old, new } => {
            ("disk-resized", disk, format!("{old} -> {new} bytes"))
        }
        What::ResizeBegun { disk, size } => ("resize-begun", disk, format!("to {size} bytes")),
        What::ResizeEnded { disk, error } => ("resize-ended", disk, flat(error, "done")),
        What::ClientConnected { disk, export, client: id, program, .. } => {
            ("client-connected", disk, client(export, id, program))
        }
        What::ClientDisconnected { disk, export, client: id, program, why, .. } => {
            ("client-disconnected", disk, format!("{}: {why}", client(export, id, program)))
        }
        What::DiskPaused { disk, requests } => {
            let what = format!("{requests} requests wait for space: free some, then ctl resume");
            ("disk-paused", disk, what)
        }
        What::DiskResumed { disk } => ("disk-resumed", disk, String::new()),
        What::DiskDrained { disk } => ("disk-drained", disk, "requests wait for ctl resume".into()),
        What::DrainEnded { disk, expired } => {
            let what = if *expired { "requests went on after the time of the drain" } else { "" };
            ("drain-ended", disk, what.into())
        }
        What::DiskPoisoned { disk, why } => ("disk-poisoned", disk, why.clone()),
        What::JobBegun { job } => ("job-begun", &job.disk, of_job(job)),
        What::JobProgressed { job } => ("job-progressed", &job.disk, of_job(job)),
        What::JobEnded { job } => ("job-ended", &job.disk, of_job(job)),
        What::Reloaded { added, changed, removed, failed, groups, error } => {
            let good = format!(
                "disks added {added}, changed {changed}, removed {removed}, failed {failed}; \
                 groups changed {groups}"
            );
            ("reloaded", "", flat(error, &good))
        }
        What::HandOverBegun => ("hand-over-begun", "", String::new()),
        What::HandOverEnded { pid, error } => {
            let good = format!("process {} serves the disks", pid.unwrap_or_default());
            ("hand-over-ended", "", flat(error, &good))
        }
        What::Lost { count: Some(count) } => ("lost", "", format!("{count} events")),
        What::Lost { count: None } => ("lost", "", "events of an earlier server".into()),
    }
}

fn of_job(job: &Job) -> String {
    let Job { number, kind, done, total, .. } = job;
    match (job.state, &job.error) {
        (JobState::Running, _) => format!("job {number}, {kind}: {done} of {total} bytes"),
        (JobState::Done, _) => format!("job {number}, {kind}: done"),
        (JobState::Failed, error) => {
            format!("job {number}, {kind}: failed: {}", error.as_deref().unwrap_or_default())
        }
    }
}

/// Returns a time in microseconds since 1970 as text (RFC 3339), in UTC.
pub fn utc(micros: u64) -> String {
    let (seconds, millis) = (micros / 1_000_000, micros / 1000 % 1000);
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0; a year that begins in March has its leap day at its end.
    let days = day + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!(
        "{:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{:02}.{millis:03}Z",
        year + era * 400 + next,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_399, "2000-02-28T23:59:59.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (1_709_251_199, "2024-02-29T23:59:59.007Z"),
            (4_102_444_800, "2100-01-01T00:00:00.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(utc(seconds * 1_000_000 + 7_000), text);
        }
    }

    #[test]
    fn a_line_has_no_control_characters() {
        let what = What::DiskResumed { disk: "a\u{1b}[2J".into() };
        let line = line(&Event { id: "1-1".into(), time_us: 0, what });
        assert_eq!(line, "1970-01-01T00:00:00.000Z  disk-resumed          a?[2J");
    }
}
