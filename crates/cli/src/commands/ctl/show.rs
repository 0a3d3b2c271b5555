//! Answers of the API as text for people.

use std::fmt::Write;

use blockyard_control::types::{
    Client, Disconnected, Disk, DiskRow, Disks, Drained, HandedOver, Job, JobState, Jobs,
    LimitSetting, Reload, Resized, Resumed, ServerInfo, Settings, State, UnopenedDisk, Upgraded,
};
use blockyard_program::output::shell;
use blockyard_ring::text::is_deceptive;
use serde_json::Value;
use unicode_width::UnicodeWidthStr;

use super::Command;
use super::events::utc;

/// Returns the answer of a command as text for a terminal, whatever names it contains.
pub fn text(command: &Command, answer: Value) -> serde_json::Result<String> {
    let text = plain(command, answer)?;
    Ok(text.replace(|c| c != '\n' && is_deceptive(c), "?"))
}

fn plain(command: &Command, mut answer: Value) -> serde_json::Result<String> {
    Ok(match command {
        Command::Status => {
            let disks: Vec<DiskRow> = serde_json::from_value(answer["disks"].take())?;
            let jobs: Vec<Job> = serde_json::from_value(answer["jobs"].take())?;
            answer["disks"] = disks.len().into();
            status(&serde_json::from_value(answer)?, &disks, &jobs)
        }
        Command::Events { .. } => String::new(),
        Command::List => list(&serde_json::from_value::<Disks>(answer)?.disks),
        Command::Names => names(&serde_json::from_value::<Disks>(answer)?.disks),
        Command::Show { .. } | Command::Add { .. } | Command::Fork { .. } | Command::Set { .. } => {
            disk(&serde_json::from_value(answer)?)
        }
        Command::Remove { disk, .. } => match answer["flushed"] == false {
            true => format!("removed {disk}, not flushed\n"),
            false => format!("removed {disk}\n"),
        },
        Command::Flush { disk } => format!("flushed {disk}\n"),
        Command::Resume { disk } => {
            let Resumed { requests, drained, opening, .. } = serde_json::from_value(answer)?;
            match (drained, requests) {
                _ if opening => {
                    format!("{disk} is not open yet: if it waits for space, it tries again now\n")
                }
                (true, 0) => format!("resumed {disk} after a drain\n"),
                (false, 0) => format!("{disk} was not drained, and no request waited for space\n"),
                (_, 1..) => {
                    let drained = if drained { " after a drain" } else { "" };
                    format!(
                        "resumed {disk}{drained}: {requests} requests that waited for space try \
                         again\n"
                    )
                }
            }
        }
        Command::Drain { disk, .. } => {
            let Drained { seconds, .. } = serde_json::from_value(answer)?;
            let name = shell(disk);
            format!("drained {disk}: requests wait for `ctl resume {name}`, at most {seconds} s\n")
        }
        Command::Disconnect { disk, .. } => {
            let Disconnected { clients, .. } = serde_json::from_value(answer)?;
            let clients = if clients.is_empty() { "no client".into() } else { clients.join(", ") };
            format!("{disk}: disconnected {clients}\n")
        }
        Command::Snapshot { .. }
        | Command::Backup { .. }
        | Command::Commit { .. }
        | Command::Stream { .. }
        | Command::Wait { .. }
        | Command::Cancel { .. } => jobs(&[serde_json::from_value(answer)?]),
        Command::Jobs => jobs(&serde_json::from_value::<Jobs>(answer)?.jobs),
        Command::Reload { .. } => reload(&serde_json::from_value(answer)?),
        Command::Upgrade { .. } => upgraded(&serde_json::from_value(answer)?),
        Command::Refresh { disk } | Command::Resize { disk, .. } => {
            let Resized { old, new } = serde_json::from_value(answer)?;
            format!("{disk}: {old} -> {new} bytes\n")
        }
    })
}

fn upgraded(done: &Upgraded) -> String {
    let mut rows = vec![row(&["disk", "pause"])];
    let mut changed = String::new();
    for HandedOver { name, pause_us, changed: keys } in &done.disks {
        rows.push(vec![name.clone(), format!("{:.1} ms", *pause_us as f64 / 1000.0)]);
        if !keys.is_empty() {
            let what = clean(&format!("{name}: changed: {}", crate::changes::describe(keys)));
            let _ = writeln!(changed, "{what} (the configuration file has changed)");
        }
    }
    let mut text = format!(
        "process {} (version {}) serves the disks\n{}",
        done.pid,
        done.version,
        table(&rows)
    );
    text += &changed;
    for disk in &done.ended {
        let what = clean(&format!("{disk}: ended"));
        let _ = writeln!(text, "{what} (the configuration does not have it)");
    }
    if done.disconnected > 0 {
        let were = if done.disconnected == 1 { "was" } else { "were" };
        text += &format!(
            "{} {were} disconnected (TLS, or no export chosen yet)\n",
            number(done.disconnected, "NBD client")
        );
    }
    text
}

/// Returns a text without control characters, which could change what a terminal has shown.
pub(super) fn clean(text: &str) -> String {
    blockyard_ring::text::clean(text)
}

/// Returns rows with aligned columns. Control characters of names do not reach the terminal.
fn table(rows: &[Vec<String>]) -> String {
    let cleaned = |row: &Vec<String>| row.iter().map(|cell| clean(cell)).collect();
    let rows: Vec<Vec<_>> = rows.iter().map(cleaned).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max()
    };
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell}{:1$}", "", width.saturating_sub(cell.width())));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| cell.to_string()).collect()
}

/// Returns a size with a unit: `10 GiB`, `1.5 MiB`, `512 B`.
fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.iter().find(|(_, shift)| bytes >> shift > 0);
    let Some((name, shift)) = unit else { return format!("{bytes} B") };
    let number = bytes as f64 / (1u64 << shift) as f64;
    let text = format!("{number:.1}");
    format!("{} {name}", text.trim_end_matches(".0"))
}

/// Returns a number of things: `1 disk`, `2 disks`.
fn number(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns the command that lets the requests of a disk go on.
fn resume(disk: &str) -> String {
    format!("`blockyard ctl resume {}`", shell(disk))
}

fn state_of(disk: &DiskRow) -> &'static str {
    match disk.state {
        State::Opening => "opening",
        State::Serving | State::Busy if disk.poisoned.is_some() => "poisoned",
        // A command does not end the pause.
        State::Serving | State::Busy if disk.drained => "drained",
        State::Serving | State::Busy if disk.paused > 0 => "paused",
        State::Serving if disk.inactive => "no-guest",
        State::Serving if disk.read_only => "read-only",
        State::Serving => "serving",
        State::Busy => "busy",
        State::Closing => "closing",
    }
}

/// Returns the names of disks that mean nothing else to a shell.
fn names(disks: &[DiskRow]) -> String {
    let names = disks.iter().map(|disk| &disk.name);
    let plain = names.filter(|name| !name.starts_with('-') && shell(name) == name.as_str());
    plain.map(|name| format!("{name}\n")).collect()
}

fn list(disks: &[DiskRow]) -> String {
    let mut rows = vec![row(&["NAME", "STATE", "SIZE", "IMAGE", "EXPORTS"])];
    for disk in disks {
        let image = if disk.images.is_empty() { "-" } else { &disk.images };
        rows.push(row(&[
            &disk.name,
            state_of(disk),
            &size(disk.size),
            image,
            &disk.exports.join(", "),
        ]));
    }
    table(&rows)
}

fn status(server: &ServerInfo, disks: &[DiskRow], all: &[Job]) -> String {
    let config = server.config.as_deref().unwrap_or("none");
    let mut text = format!(
        "blockyard {}, process {}, {}, configuration file: {config}\n\n",
        server.version,
        server.pid,
        number(server.disks as u64, "disk")
    );
    text += &list(disks);
    if !server.failed.is_empty() {
        let mut rows = vec![row(&["NOT SERVED", "SINCE", "IMAGE", "WHY"])];
        for UnopenedDisk { name, image, error, since } in &server.failed {
            rows.push(row(&[name, &time(*since), image, error]));
        }
        text.push('\n');
        text += &table(&rows);
    }
    for disk in disks {
        let Some(why) = &disk.poisoned else { continue };
        let _ = write!(text, "\n{}: poisoned: {}\n", clean(&disk.name), clean(why));
    }
    for disk in disks.iter().filter(|disk| disk.paused > 0) {
        let _ = write!(
            text,
            "\n{}: requests that wait for space on the host: {}; free some, then {}\n",
            clean(&disk.name),
            disk.paused,
            resume(&disk.name)
        );
    }
    for disk in disks.iter().filter(|disk| disk.drained) {
        let name = clean(&disk.name);
        let command = resume(&disk.name);
        let _ = write!(text, "\n{name}: a drain holds its requests back until {command}\n");
    }
    let running: Vec<_> =
        all.iter().filter(|job| job.state == JobState::Running).cloned().collect();
    if !running.is_empty() {
        text.push('\n');
        text += &jobs(&running);
    }
    text
}

fn disk(disk: &Disk) -> String {
    let mut rows = vec![
        row(&["name", &disk.row.name]),
        row(&["state", state_of(&disk.row)]),
        row(&["size", &format!("{} ({} bytes)", size(disk.row.size), disk.row.size)]),
        row(&["images", &disk.row.images]),
        row(&["exports", &disk.row.exports.join(", ")]),
    ];
    rows.extend(disk.row.poisoned.iter().map(|why| row(&["poisoned", why])));
    if disk.row.inactive {
        rows.push(row(&["image", "closed, because no ring of a guest runs"]));
    }
    if disk.row.drained {
        let left = match disk.drain_seconds_left {
            Some(seconds) => format!("{seconds} s left; "),
            None => String::new(),
        };
        let what = format!("requests wait: {left}{} ends it", resume(&disk.row.name));
        rows.push(row(&["drain", &what]));
    }
    if disk.row.paused > 0 {
        let what = format!("{}; free some, then {}", disk.row.paused, resume(&disk.row.name));
        rows.push(row(&["requests that wait for space", &what]));
    }
    if let Some(device) = &disk.device {
        rows.push(row(&["device", device]));
    }
    rows.push(row(&["clients", &disk.clients.len().to_string()]));
    rows.extend(disk.settings.iter().flat_map(settings));
    if let Some(share) = &disk.share {
        let device = share.device.as_deref().unwrap_or("none");
        rows.push(row(&["shared device", device]));
        rows.push(row(&["waiting for limits and share", &share.queued.to_string()]));
    }
    let mut text = table(&rows);
    if !disk.clients.is_empty() {
        let mut rows = vec![row(&["CLIENT", "PROGRAM", "USER", "SINCE", "FEATURES"])];
        rows.extend(disk.clients.iter().map(client));
        text.push('\n');
        text += &table(&rows);
    }
    if !disk.requests.is_empty() {
        let times = ["QUEUE us p50/p99", "SERVICE us p50/p99"];
        let mut rows =
            vec![row(&[&["REQUESTS", "NUMBER", "BYTES", "ERRORS"][..], &times].concat())];
        for (kind, requests) in &disk.requests {
            let both = |times: &[f64]| format!("{:.0}/{:.0}", times[0], times[1]);
            rows.push(row(&[
                kind,
                &requests.requests.to_string(),
                &size(requests.bytes),
                &requests.errors.to_string(),
                &both(&requests.queue_us),
                &both(&requests.service_us),
            ]));
        }
        text.push('\n');
        text += &table(&rows);
    }
    text
}

/// Returns a time, given in seconds since 1970.
fn time(seconds: u64) -> String {
    utc(seconds * 1_000_000).replace(".000", "")
}

/// Returns the row of a client. A dash stands for what its protocol does not tell.
fn client(client: &Client) -> Vec<String> {
    let told = |what: Option<String>| what.unwrap_or_else(|| "-".into());
    vec![
        client.description.clone(),
        told(client.program.clone()),
        told(client.uid.map(|uid| uid.to_string())),
        told(client.since.map(time)),
        told(client.features.clone()),
    ]
}

fn settings(settings: &Settings) -> Vec<Vec<String>> {
    let mut rows = vec![row(&["cache", &settings.cache])];
    rows.push(row(&["on-enospc", &settings.on_enospc]));
    if !settings.activation.is_empty() {
        rows.push(row(&["activation", &settings.activation]));
    }
    let mut add = |key: &str, value: Option<String>| rows.extend(value.map(|v| row(&[key, &v])));
    let limit = |limit: Option<LimitSetting>| {
        limit.map(|LimitSetting { rate, max, length }| match max {
            Some(max) => format!("{rate}, bursts of {max} for {length} s"),
            None => rate.to_string(),
        })
    };
    add("format", settings.format.clone());
    add("group", settings.group.clone());
    add("weight", Some(settings.weight.to_string()));
    add("reserve-iops", settings.reserve_iops.map(|n| n.to_string()));
    add("reserve-bps", settings.reserve_bps.map(|n| n.to_string()));
    add("iops", limit(settings.iops));
    add("iops-read", limit(settings.iops_read));
    add("iops-write", limit(settings.iops_write));
    add("bps", limit(settings.bps));
    add("bps-read", limit(settings.bps_read));
    add("bps-write", limit(settings.bps_write));
    add("latency-target", settings.latency_target_us.map(|us| format!("{us} us")));
    let names = |names: &Vec<String>| match names.is_empty() {
        true => "no client".into(),
        false => names.join(", "),
    };
    add("tls-allow", settings.tls_allow.as_ref().map(names));
    add("origin", settings.added_by_api.then(|| "added by a call of the API".into()));
    rows
}

fn jobs(jobs: &[Job]) -> String {
    let mut rows = vec![row(&["JOB", "DISK", "STATE", "DONE", "WHAT"])];
    for job in jobs {
        let state = match job.state {
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Failed => "failed",
        };
        let done = match (job.done, job.total) {
            (_, 0) => "-".into(),
            (done, total) => format!("{} of {}", size(done), size(total)),
        };
        let what = match &job.error {
            Some(error) => format!("{}: {error}", job.kind),
            None => job.kind.clone(),
        };
        rows.push(row(&[&job.number.to_string(), &job.disk, state, &done, &what]));
    }
    table(&rows)
}

fn reload(reload: &Reload) -> String {
    let mut text = String::new();
    let will = if reload.dry_run { "would be " } else { "" };
    for disk in &reload.added {
        let _ = writeln!(text, "{disk}: {will}added");
    }
    for change in &reload.changed {
        let keys = crate::changes::describe(&change.keys);
        let how = if change.disconnects { ", and any clients disconnected" } else { "" };
        let _ = writeln!(text, "{}: {will}changed{how}: {keys}", change.disk);
    }
    for disk in &reload.removed {
        let _ = writeln!(text, "{disk}: {will}removed, and any clients disconnected");
    }
    for change in &reload.groups {
        let keys = crate::changes::describe(&change.keys);
        let _ = writeln!(text, "group {}: {will}changed: {keys}", change.group);
    }
    if !reload.nbd.is_empty() {
        let keys = crate::changes::describe(&reload.nbd);
        let _ = writeln!(text, "NBD: {will}changed: {keys}");
    }
    for ignored in &reload.ignored {
        let change = crate::changes::describe(std::slice::from_ref(&ignored.change));
        let _ = writeln!(text, "not applied: {change}: {}", ignored.reason);
    }
    for failed in &reload.failed {
        let _ = writeln!(text, "{}: failed: {}", failed.disk, failed.error);
    }
    if text.is_empty() {
        text = "no changes\n".into();
    }
    text
}

#[cfg(test)]
mod tests {
    use blockyard_control::types::FailedDisk;

    use super::*;

    #[test]
    fn no_answer_sends_characters_to_a_terminal_that_turn_or_hide_text() {
        let name = "a\u{202e}b\u{1b}[2J\nc";
        let failed = FailedDisk { disk: name.into(), error: name.into() };
        let reload =
            Reload { removed: vec![name.into()], failed: vec![failed], ..Reload::default() };
        let answer = serde_json::to_value(reload).unwrap();
        let shown = text(&Command::Reload { dry_run: false }, answer).unwrap();
        assert!(!shown.contains(|c: char| c != '\n' && is_deceptive(c)), "{shown:?}");
        assert!(shown.starts_with("a?b?[2J"), "{shown}");
        let flushed = text(&Command::Flush { disk: name.into() }, Value::Null).unwrap();
        assert!(flushed.starts_with("flushed a?b?[2J"), "{flushed}");
    }

    #[test]
    fn sizes_have_one_decimal_and_tables_are_aligned() {
        assert_eq!([size(512), size(10 << 30), size(1536)], ["512 B", "10 GiB", "1.5 KiB"]);
        let text = table(&[row(&["A", "B"]), row(&["long", "\x1b[31mx"])]);
        assert_eq!(text, "A     B\nlong  ?[31mx\n");
        let text = table(&[row(&["日本", "B"]), row(&["long", "x"])]);
        assert_eq!(text, "日本  B\nlong  x\n");
    }

    fn row_of(name: &str) -> DiskRow {
        DiskRow {
            name: name.into(),
            state: State::Serving,
            image: None,
            images: String::new(),
            size: 0,
            read_only: false,
            exports: Vec::new(),
            paused: 0,
            drained: false,
            poisoned: None,
            inactive: false,
        }
    }

    #[test]
    fn a_status_has_numbers_of_things_and_commands_with_the_name_of_the_disk() {
        let server: ServerInfo = serde_json::from_value(serde_json::json!({
            "version": "1", "pid": 2, "since": 3, "disks": 1, "config": null,
        }))
        .unwrap();
        assert_eq!(server.failed, []);
        let paused = DiskRow { paused: 1, ..row_of("a b") };
        let text = status(&server, std::slice::from_ref(&paused), &[]);
        assert!(text.contains("process 2, 1 disk, configuration"), "{text}");
        let lines = [
            "a b: requests that wait for space on the host: 1; free some, then `blockyard ctl resume \
             'a b'`",
            "c: a drain holds its requests back until `blockyard ctl resume c`",
            "p: poisoned: a flush failed",
        ];
        let drained = DiskRow { drained: true, ..row_of("c") };
        let poisoned = DiskRow { poisoned: Some("a flush failed".into()), ..row_of("p") };
        let all = [paused, drained, poisoned];
        let two = status(&ServerInfo { disks: 2, ..server.clone() }, &all, &[]);
        let failed = UnopenedDisk {
            name: "d".into(),
            image: "/i".into(),
            error: "gone".into(),
            since: 86_400,
        };
        let text = status(&ServerInfo { failed: vec![failed], ..server.clone() }, &[], &[]);
        assert!(text.contains("\nNOT SERVED  SINCE"), "{text}");
        assert!(text.contains("1970-01-02") && text.contains("  /i     gone\n"), "{text}");
        assert!(two.contains("process 2, 2 disks, configuration"), "{two}");
        assert!(lines.iter().all(|line| two.lines().any(|other| other == *line)), "{two}");
    }

    #[test]
    fn a_disk_that_serves_less_than_it_should_says_so() {
        let poisoned = DiskRow { poisoned: Some("a flush failed".into()), ..row_of("p") };
        assert_eq!(state_of(&DiskRow { drained: true, ..poisoned.clone() }), "poisoned");
        let (device, clients, share, settings, requests) = Default::default();
        let drained = DiskRow { drained: true, inactive: true, ..poisoned.clone() };
        let (row, drain_seconds_left) = (drained, Some(7));
        let all = Disk { row, drain_seconds_left, device, clients, share, settings, requests };
        let shown = disk(&all);
        for line in [
            "state     poisoned",
            "poisoned  a flush failed",
            "image     closed, because no ring of a guest runs",
            "drain     requests wait: 7 s left; `blockyard ctl resume p` ends it",
        ] {
            assert!(shown.lines().any(|other| other == line), "{line}: {shown}");
        }
        assert!(list(&[poisoned]).contains("poisoned"));
        assert_eq!(state_of(&DiskRow { inactive: true, ..row_of("i") }), "no-guest");
    }

    #[test]
    fn what_a_reload_removes_need_not_have_clients() {
        let done = Reload { removed: vec!["a".into()], ..Reload::default() };
        assert_eq!(reload(&done), "a: removed, and any clients disconnected\n");
        let upgraded = |disconnected| {
            let (pid, version, disks, ended) = Default::default();
            upgraded(&Upgraded { pid, version, disks, ended, disconnected })
        };
        assert!(upgraded(1).contains("\n1 NBD client was disconnected"));
        assert!(upgraded(2).contains("\n2 NBD clients were disconnected"));
    }

    #[test]
    fn only_plain_names_are_completed() {
        let all = ["web", "$(reboot)", "a b", "`x`", "-x", "x;y", "a/b.c", "*"].map(row_of);
        assert_eq!(names(&all), "web\na/b.c\n");
    }
}
