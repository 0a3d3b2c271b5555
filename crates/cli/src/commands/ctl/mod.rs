//! `blockyard ctl`: calls of a server's API, with tables for people and JSON for programs.

mod events;
mod show;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use blockyard_control::client::{call, segment, wait_for_job};
use blockyard_control::types::{Job, JobState};
use blockyard_program::ending::Failure;
use blockyard_program::output;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand, ValueHint};
use http::Method;
use serde_json::{Map, Value, json};

use crate::options::values;

/// Environment variable with the path of the API's socket.
pub const VARIABLE: &str = "BLOCKYARD_API";

/// Where a server's API is unless an option says otherwise.
pub const USUAL: &str = "/run/blockyard/api.sock";

#[derive(Args)]
pub struct CtlOptions {
    /// Socket of the server's API.
    #[arg(long, global = true, value_name = "SOCKET", env = VARIABLE,
        default_value = USUAL, value_hint = ValueHint::FilePath)]
    pub api: PathBuf,
    /// Print the answer as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// Seconds to wait for an answer.
    #[arg(long, global = true, value_name = "SECONDS", default_value = "60",
        value_parser = values::parse_limit)]
    pub timeout: Duration,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Show the server and its disks.
    Status,
    /// Print the server's events as they happen: disks, clients, jobs, reloads.
    ///
    /// Ends when the server ends. With --json, each line is one event.
    Events {
        /// Begin after the event with this id; 0: with the oldest that the server still has
        /// [default: with the next one].
        #[arg(long, value_name = "ID")]
        since: Option<String>,
    },
    /// List the disks.
    List,
    /// Print the names of the disks, for the completions of a shell.
    ///
    /// Leaves out names with characters that a shell would interpret.
    #[command(hide = true)]
    Names,
    /// Show a disk: images, clients, settings, statistics.
    Show {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
    },
    /// Add a disk.
    ///
    /// A reload keeps the disk, although the configuration file lacks it. A restart does not,
    /// unless --persist is given.
    Add {
        /// Write the disk into the folder conf.d of the configuration too.
        #[arg(long)]
        persist: bool,
        /// Keys of a [[disk]] table (docs/configuration.md), such as image=/srv/a.qcow2.
        #[arg(required = true, value_name = "KEY=VALUE")]
        keys: Vec<String>,
    },
    /// Remove a disk. Refuses while clients are connected.
    Remove {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Disconnect clients.
        #[arg(long)]
        force: bool,
        /// Remove the disk from the configuration too.
        #[arg(long)]
        persist: bool,
    },
    /// Change weight, limits, reservations, latency-target, tls-allow, on-enospc or cache.
    ///
    /// Clients stay connected, except for cache: the disk is closed and opened again. A restart or
    /// a reload restores the values of the configuration file, unless --persist is given.
    Set {
        /// Change cache also if clients are connected: they must connect again.
        #[arg(long)]
        force: bool,
        /// Write the values into the folder conf.d of the configuration too.
        #[arg(long)]
        persist: bool,
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Keys, such as iops=5000. An empty value restores the default.
        #[arg(required = true, value_name = "KEY=VALUE")]
        keys: Vec<String>,
    },
    /// Take a snapshot: later writes go to a new overlay, and the image stays as it is.
    ///
    /// Afterwards, a start must name the overlay as the image: see --persist.
    Snapshot {
        /// Name the overlay as the disk's image in the folder conf.d of the configuration too.
        #[arg(long)]
        persist: bool,
        /// Continue although the image cannot record that it has an overlay. Then nothing stops a
        /// server that opens the image alone.
        #[arg(long)]
        unrecorded: bool,
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Path of the overlay to create.
        #[arg(value_hint = ValueHint::FilePath)]
        overlay: PathBuf,
        /// Return at once, and leave the job to `ctl wait`.
        #[arg(long)]
        no_wait: bool,
    },
    /// Copy a disk as it is at this moment into a new image, while guests go on.
    ///
    /// The copy is what a power cut at the beginning would leave.
    Backup {
        /// Format of the new image [default: by its name, else raw].
        #[arg(long, value_name = "FORMAT", value_parser = ["raw", "qcow2"])]
        format: Option<String>,
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Path of the image to create.
        #[arg(value_hint = ValueHint::FilePath)]
        target: PathBuf,
        /// Return at once, and leave the job to `ctl wait`.
        #[arg(long)]
        no_wait: bool,
    },
    /// Add a second, writable disk that begins with the present content of a disk.
    ///
    /// Takes a snapshot: the disk goes on in OVERLAY, as after `ctl snapshot`. The new disk has its
    /// own image on the same base.
    Fork {
        /// Write both disks into the folder conf.d of the configuration too.
        #[arg(long)]
        persist: bool,
        /// Continue although the image cannot record that it has an overlay. Then nothing stops a
        /// server that opens the image alone.
        #[arg(long)]
        unrecorded: bool,
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Path of the overlay to create for the disk.
        #[arg(value_hint = ValueHint::FilePath)]
        overlay: PathBuf,
        /// Keys of the new disk, as for `ctl add`. image is the path of the image to create.
        #[arg(required = true, value_name = "KEY=VALUE")]
        keys: Vec<String>,
    },
    /// Copy the topmost image's data into its backing image.
    Commit {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Return at once, and leave the job to `ctl wait`.
        #[arg(long)]
        no_wait: bool,
    },
    /// Copy the data of all backing images into the topmost image.
    Stream {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Return at once, and leave the job to `ctl wait`.
        #[arg(long)]
        no_wait: bool,
    },
    /// List the jobs: snapshots, commits, streams and backups.
    Jobs,
    /// Wait for the end of a job. Fails if the job failed.
    Wait {
        /// Number of the job.
        job: u64,
    },
    /// Cancel a commit, stream or backup.
    Cancel {
        /// Number of the job.
        job: u64,
    },
    /// Read the configuration file again, apply it, and print what changed.
    Reload {
        /// Print what would change, and which disks would disconnect their clients.
        #[arg(long)]
        dry_run: bool,
    },
    /// Start a new server, and hand the disks over to it. Guests stay connected.
    ///
    /// The new server gets the command line of the running one. If it fails, the running one goes
    /// on.
    Upgrade {
        /// Program of the new server [default: the path of the running program].
        #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
        binary: Option<PathBuf>,
    },
    /// Adopt the present size of a disk's image, and notify the guest.
    Refresh {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
    },
    /// Grow a raw or qcow2 image, and notify the guest.
    Resize {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// New size in bytes (suffixes k, M, G, T).
        #[arg(value_parser = values::parse_size)]
        size: u64,
    },
    /// Make all answered writes of a disk durable.
    Flush {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
    },
    /// Hold the requests of a disk, while you work on the host's side.
    ///
    /// Returns when no request is in flight and all answered writes are durable. Requests wait
    /// until `ctl resume`, or until the time has passed.
    Drain {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// Seconds after which requests go on by themselves (1 to 600).
        #[arg(long, value_name = "SECONDS", default_value_t = 60)]
        seconds: u64,
    },
    /// Disconnect clients of a disk, after their requests are answered.
    ///
    /// They may connect again, and QEMU with reconnect-ms does so. `ctl remove --force` ends the
    /// disk instead.
    Disconnect {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
        /// The client as `ctl show` prints it, such as "pid 4711" [default: all clients].
        client: Option<String>,
    },
    /// End a drain, and let the requests that wait for space on the host try again.
    ///
    /// Requests wait for space if the disk has on-enospc = "pause". Free some space first.
    Resume {
        /// Name of the disk.
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        disk: String,
    },
}

/// A server, as this command calls it.
struct Caller<'a> {
    socket: &'a Path,
    limit: Duration,
}

impl Caller<'_> {
    fn get(&self, path: &str) -> anyhow::Result<Value> {
        Ok(call(self.socket, Method::GET, path, None, self.limit)?)
    }

    fn post(&self, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        Ok(call(self.socket, Method::POST, path, body, self.limit)?)
    }

    fn delete(&self, path: &str) -> anyhow::Result<Value> {
        Ok(call(self.socket, Method::DELETE, path, None, self.limit)?)
    }

    fn patch(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        Ok(call(self.socket, Method::PATCH, path, Some(body), self.limit)?)
    }

    /// Starts a job. Waits for its end unless `no_wait`.
    fn start(&self, path: &str, body: Option<&Value>, no_wait: bool) -> anyhow::Result<Value> {
        let job = self.post(path, body)?;
        if no_wait { Ok(job) } else { self.wait(serde_json::from_value::<Job>(job)?.number) }
    }

    fn wait(&self, number: u64) -> anyhow::Result<Value> {
        let job = wait_for_job(self.socket, number, self.limit)?;
        if job.state == JobState::Failed {
            bail!(failed(&job))
        }
        Ok(serde_json::to_value(job)?)
    }
}

/// Returns why a job failed. A server of an earlier version may send control characters.
fn failed(job: &Job) -> String {
    let why = job.error.as_deref().unwrap_or_default();
    let [kind, disk, why] = [job.kind.as_str(), job.disk.as_str(), why].map(show::clean);
    format!("job {} ({kind} of disk \"{disk}\") failed: {why}", job.number)
}

pub fn run(options: &CtlOptions) -> Result<(), Failure> {
    if let Command::Events { since } = &options.command {
        return Ok(events::print(options, since.as_deref())?);
    }
    let caller = Caller { socket: &options.api, limit: options.timeout };
    let answer = answer(&caller, &options.command)?;
    let failure = failure(&options.command, &answer);
    let text =
        if options.json { format!("{answer:#}\n") } else { show::text(&options.command, answer)? };
    output::print(text)?;
    failure.map_or(Ok(()), |what| Err(anyhow::anyhow!(what).into()))
}

/// Returns what failed although the server has carried out the command.
fn failure(command: &Command, answer: &Value) -> Option<String> {
    match command {
        Command::Reload { .. } => match answer["failed"].as_array().map_or(0, Vec::len) {
            0 => None,
            1 => Some("the reload of 1 disk failed".into()),
            failed => Some(format!("the reload of {failed} disks failed")),
        },
        Command::Remove { disk, .. } if answer["flushed"] == false => Some(format!(
            "disk \"{disk}\" is removed, but its image could not be flushed: writes since its \
             last flush may be lost; the server's log has the reason"
        )),
        _ => None,
    }
}

/// Makes the calls of a command. Returns the answer of the last one.
fn answer(caller: &Caller<'_>, command: &Command) -> anyhow::Result<Value> {
    let of = |disk: &str, what: &str| format!("/v1/disks/{}{what}", segment(disk));
    match command {
        Command::Status => {
            let mut answer = caller.get("/v1")?;
            answer["disks"] = caller.get("/v1/disks")?["disks"].take();
            answer["jobs"] = caller.get("/v1/jobs")?["jobs"].take();
            Ok(answer)
        }
        Command::Events { .. } => bail!("events are printed one by one"),
        Command::List | Command::Names => caller.get("/v1/disks"),
        Command::Show { disk } => caller.get(&of(disk, "")),
        Command::Add { keys, persist } => {
            caller.post(&format!("/v1/disks?persist={persist}"), Some(&object(keys)?))
        }
        Command::Remove { disk, force, persist } => {
            caller.delete(&of(disk, &format!("?force={force}&persist={persist}")))
        }
        Command::Set { disk, keys, force, persist } => {
            caller.patch(&of(disk, &format!("?force={force}&persist={persist}")), &object(keys)?)
        }
        Command::Snapshot { disk, overlay, persist, unrecorded, no_wait } => {
            let overlay = full(overlay)?;
            let body = json!({ "overlay": overlay, "persist": persist, "unrecorded": unrecorded });
            caller.start(&of(disk, "/snapshot"), Some(&body), *no_wait)
        }
        Command::Backup { disk, target, format, no_wait } => {
            let body = json!({ "target": full(target)?, "format": format });
            caller.start(&of(disk, "/backup"), Some(&body), *no_wait)
        }
        Command::Fork { disk, overlay, keys, persist, unrecorded } => {
            let (overlay, keys) = (full(overlay)?, object(keys)?);
            let body = json!({
                "overlay": overlay, "persist": persist, "unrecorded": unrecorded, "disk": keys,
            });
            caller.post(&of(disk, "/fork"), Some(&body))
        }
        Command::Commit { disk, no_wait } => caller.start(&of(disk, "/commit"), None, *no_wait),
        Command::Stream { disk, no_wait } => caller.start(&of(disk, "/stream"), None, *no_wait),
        Command::Jobs => caller.get("/v1/jobs"),
        Command::Wait { job } => caller.wait(*job),
        Command::Cancel { job } => caller.delete(&format!("/v1/jobs/{job}")),
        Command::Reload { dry_run } => caller.post(&format!("/v1/reload?dry-run={dry_run}"), None),
        Command::Upgrade { binary } => {
            let binary = binary.as_deref().map(full).transpose()?;
            caller.post("/v1/upgrade", Some(&json!({ "binary": binary })))
        }
        Command::Refresh { disk } => caller.post(&of(disk, "/refresh"), None),
        Command::Resize { disk, size } => {
            caller.post(&of(disk, "/resize"), Some(&json!({ "size": size })))
        }
        Command::Flush { disk } => caller.post(&of(disk, "/flush"), None),
        Command::Drain { disk, seconds } => {
            caller.post(&of(disk, "/drain"), Some(&json!({ "seconds": seconds })))
        }
        Command::Disconnect { disk, client } => {
            caller.post(&of(disk, "/disconnect"), Some(&json!({ "client": client })))
        }
        Command::Resume { disk } => caller.post(&of(disk, "/resume"), None),
    }
}

/// Keys with values that are always texts, also if they look like numbers.
const TEXTS: [&str; 8] =
    ["name", "image", "serial", "description", "device", "group", "nbd-name", "vhost-user"];

/// Returns a path for the server, which may have another working folder.
fn full(path: &Path) -> anyhow::Result<String> {
    let path = std::path::absolute(path).context("finding the working folder")?;
    let text = path.into_os_string().into_string();
    text.map_err(|path| anyhow::anyhow!("path {path:?}: the API takes paths in UTF-8 only"))
}

/// Parses KEY=VALUE. A value is a number, true, false or JSON; else it is text. No value: null.
fn object(keys: &[String]) -> anyhow::Result<Value> {
    let mut object = Map::new();
    for text in keys {
        let Some((key, value)) = text.split_once('=') else {
            bail!("\"{text}\": a key and its value are KEY=VALUE, such as weight=200");
        };
        if key.is_empty() {
            bail!("\"{text}\": the key is missing: write KEY=VALUE, such as weight=200");
        }
        let value = match value {
            "" => Value::Null,
            _ => match serde_json::from_str(value) {
                Ok(parsed @ Value::String(_)) => parsed,
                Ok(parsed) if !TEXTS.contains(&key) => parsed,
                _ => value.into(),
            },
        };
        if object.insert(key.into(), value).is_some() {
            bail!("the key {key} is given twice");
        }
    }
    Ok(Value::Object(object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_failed_sends_no_control_characters_to_the_terminal() {
        let job = Job {
            number: 3,
            disk: "a".into(),
            kind: "snapshot into /x\n\u{1b}[2J.qcow2".into(),
            state: JobState::Failed,
            done: 0,
            total: 0,
            error: Some("/x\n\u{1b}[2J.qcow2 exists already".into()),
        };
        let expected = "job 3 (snapshot into /x??[2J.qcow2 of disk \"a\") failed: \
                        /x??[2J.qcow2 exists already";
        assert_eq!(failed(&job), expected);
    }

    #[test]
    fn values_of_keys_are_json_or_text() {
        let keys = ["image=/a b", "queues=4", "read-only=true", "iops=", "serial=\"5\""];
        let texts = ["serial=12345678901234567890123", "name=true", "group=\"5\""];
        let texts = object(&texts.map(String::from)).unwrap();
        let expected = json!({ "serial": "12345678901234567890123", "name": "true", "group": "5" });
        assert_eq!(texts, expected);
        let object = object(&keys.map(String::from)).unwrap();
        let expected = json!({
            "image": "/a b", "queues": 4, "read-only": true, "iops": null, "serial": "5"
        });
        assert_eq!(object, expected);
    }
}
