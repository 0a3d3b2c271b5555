//! Settings, figures and errors in the words of the API.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use blockyard_control::types::{
    Client, DiskRow, Job, JobState, LimitSetting, Requests, Resized, Settings, ShareFigures, State,
};
use blockyard_control::{Answer, Kind, Object, Problem, invalid};
use blockyard_disk::{OpKind, Statistics, Why, WorkError};
use blockyard_sched::{Limit, Share};
use blockyard_yard::{Activation, DiskInfo, DiskState, YardError};
use serde_json::Value;
use toml::Table;

use super::error::RemoveError;
use super::hand_overs::NotNow;
use crate::config::mistake;
use crate::disks::book::{Entry, HoldError};
use crate::options::disk::DiskArgs;

/// Size of a sector in bytes. The size of a disk is a multiple of it.
const SECTOR: u64 = 512;

/// Keys that change while the disk is served. All but `cache` do so without a reconnection.
const CHANGEABLE: [&str; 13] = [
    "weight",
    "reserve-iops",
    "reserve-bps",
    "iops",
    "iops-read",
    "iops-write",
    "bps",
    "bps-read",
    "bps-write",
    "latency-target",
    "tls-allow",
    "on-enospc",
    "cache",
];

pub fn problem(error: YardError) -> Problem {
    Problem::new(kind(&error), format!("{:#}", anyhow::Error::from(error)))
}

fn kind(error: &YardError) -> Kind {
    match error {
        YardError::NotFound { .. } => Kind::NotFound,
        YardError::NameTaken { .. } | YardError::Busy { .. } | YardError::Holds { .. } => {
            Kind::Conflict
        }
        YardError::Work(e) => kind_of_work(e),
        YardError::TooManyJobs { .. } | YardError::Thread { .. } | YardError::Closing => Kind::Busy,
        _ => Kind::Failed,
    }
}

fn kind_of_work(error: &WorkError) -> Kind {
    match *error.why {
        Why::Busy | Why::Drained | Why::Ended => Kind::Conflict,
        _ => Kind::Failed,
    }
}

/// Returns the problem of a job that failed.
pub fn work(error: Arc<WorkError>) -> Problem {
    Problem::new(kind_of_work(&error), format!("{:#}", anyhow::Error::new(error)))
}

/// Returns the problem of an upgrade. It is a conflict if the same call may succeed later.
pub fn upgrade(error: &anyhow::Error) -> Problem {
    let kind = match error.downcast_ref() {
        Some(error) => kind(error),
        None if error.is::<NotNow>() || error.is::<HoldError>() => Kind::Conflict,
        None => Kind::Failed,
    };
    Problem::new(kind, format!("not upgraded: {error:#}"))
}

pub fn removal(error: RemoveError) -> Problem {
    match error {
        RemoveError::Yard(e) => problem(e),
        goes_on @ RemoveError::GoesOn { .. } => Problem::new(Kind::Busy, goes_on.to_string()),
    }
}

/// Parses the keys of a disk. Returns them also as a table of the configuration file.
pub fn disk(keys: Object) -> Answer<(DiskArgs, Table)> {
    let args: DiskArgs = parse(&keys)?;
    Ok((args, table(keys)?))
}

fn parse(keys: &Object) -> Answer<DiskArgs> {
    serde_path_to_error::deserialize(Value::Object(keys.clone())).map_err(|e| {
        let path = e.path().to_string();
        let what = mistake::describe_value(&e.inner().to_string(), &path);
        invalid(&path, &what)
    })
}

/// Returns keys as a table. A key with null has its default, so it is left out.
fn table(mut keys: Object) -> Answer<Table> {
    keys.retain(|_, value| !value.is_null());
    // JSON without null has a form in TOML, except numbers from 2^63 on.
    Table::try_from(keys).map_err(|e| {
        Problem::new(Kind::Invalid, format!("a value does not fit into a configuration file: {e}"))
    })
}

/// Returns the options and the keys of a disk with some keys changed.
pub fn changed(args: DiskArgs, old: Table, keys: Object) -> Answer<(DiskArgs, Table)> {
    // The key is required, and no call changes it.
    let image = ("image".to_string(), Value::from(args.image.to_string_lossy()));
    if let Some(key) = keys.keys().find(|key| !CHANGEABLE.contains(&key.as_str())) {
        // An unknown key has a better message.
        parse(&[image, (key.clone(), keys[key].clone())].into_iter().collect())?;
        let what = format!(
            "it cannot change while the disk is served; remove the disk and add it again, or \
             change one of {}",
            CHANGEABLE.join(", ")
        );
        return Err(invalid(key, &what));
    }
    let given = keys.iter().filter(|(_, value)| !value.is_null());
    let given = given.map(|(key, value)| (key.clone(), value.clone()));
    let new = parse(&[image].into_iter().chain(given).collect())?;
    let mut knobs = args.knobs();
    let (mut tls_allow, mut on_enospc) = (args.tls_allow.clone(), args.on_enospc);
    let mut cache = args.cache;
    for key in keys.keys() {
        match key.as_str() {
            "weight" => knobs.weight = new.weight,
            "reserve-iops" => knobs.reserve_iops = new.reserve_iops,
            "reserve-bps" => knobs.reserve_bps = new.reserve_bps,
            "iops" => knobs.limits.iops = new.iops,
            "iops-read" => knobs.limits.iops_read = new.iops_read,
            "iops-write" => knobs.limits.iops_write = new.iops_write,
            "bps" => knobs.limits.bps = new.bps,
            "bps-read" => knobs.limits.bps_read = new.bps_read,
            "bps-write" => knobs.limits.bps_write = new.bps_write,
            "latency-target" => knobs.latency_target = new.latency_target,
            "on-enospc" => on_enospc = new.on_enospc,
            "cache" => cache = new.cache,
            _ => tls_allow.clone_from(&new.tls_allow),
        }
    }
    Ok((DiskArgs { tls_allow, on_enospc, cache, ..args }.with(&knobs), with(old, keys)?))
}

/// Returns a table with some keys changed.
pub fn with(mut old: Table, keys: Object) -> Answer<Table> {
    keys.keys().for_each(|key| drop(old.remove(key)));
    old.extend(table(keys)?);
    Ok(old)
}

pub fn resized(size: blockyard_yard::Resized) -> Resized {
    Resized { old: size.old, new: size.new }
}

/// Returns an error if a disk cannot grow from `old` to `new` bytes.
pub fn check_growth(args: &DiskArgs, old: u64, new: u64) -> Answer<()> {
    if args.read_only {
        let what = format!("disk \"{}\" is read-only, so its image cannot grow", args.name());
        return Err(Problem::new(Kind::Conflict, what));
    }
    if new < old {
        let what = format!("the disk has {old} bytes, and it can only grow");
        return Err(invalid("size", &what));
    }
    // The kernel's maximum size of a file.
    if !new.is_multiple_of(SECTOR) || new > i64::MAX as u64 {
        return Err(invalid("size", "it must be a multiple of 512, and less than 2^63"));
    }
    Ok(())
}

pub fn row(disk: DiskInfo) -> DiskRow {
    DiskRow {
        name: disk.name,
        state: state(disk.state),
        image: disk.image.map(|path| path.display().to_string()),
        images: disk.images,
        size: disk.capacity,
        read_only: disk.is_read_only,
        exports: disk.ways,
        paused: disk.paused,
        drained: disk.is_drained,
        poisoned: disk.unusable.map(|why| why.to_string()),
        inactive: disk.is_inactive,
    }
}

pub fn client(client: &blockyard_export::Client) -> Client {
    let since = client.since.and_then(|since| since.duration_since(UNIX_EPOCH).ok());
    Client {
        description: client.description.clone(),
        pid: client.pid,
        uid: client.uid,
        program: client.program.clone(),
        address: client.address.clone(),
        features: client.features.map(|features| format!("{features:#x}")),
        since: since.map(|since| since.as_secs()),
    }
}

pub fn limit(limit: Option<Limit>) -> Option<LimitSetting> {
    limit.map(|Limit { rate, max, length }| LimitSetting {
        rate,
        max,
        length: length.as_secs_f64(),
    })
}

pub fn state(state: DiskState) -> State {
    match state {
        DiskState::Opening => State::Opening,
        DiskState::Serving => State::Serving,
        DiskState::Busy => State::Busy,
        DiskState::Closing => State::Closing,
    }
}

pub fn settings(entry: &Entry) -> Settings {
    let args = &entry.args;
    Settings {
        format: args.format().ok().map(|format| format.to_string()),
        cache: args.cache.to_string(),
        on_enospc: args.on_enospc.to_string(),
        activation: match args.activation {
            Activation::Start => "start".into(),
            Activation::Rings => "rings".into(),
        },
        queues: args.queues,
        group: args.group.clone(),
        weight: args.weight,
        reserve_iops: args.reserve_iops,
        reserve_bps: args.reserve_bps,
        iops: limit(args.iops),
        iops_read: limit(args.iops_read),
        iops_write: limit(args.iops_write),
        bps: limit(args.bps),
        bps_read: limit(args.bps_read),
        bps_write: limit(args.bps_write),
        latency_target_us: args.latency_target.map(|time| time.as_micros() as u64),
        tls_allow: args.tls_allow.clone(),
        added_by_api: entry.by_api,
    }
}

pub fn share(share: &Share) -> ShareFigures {
    let figures = share.figures();
    ShareFigures {
        device: share.device().map(|device| device.name().to_string()),
        weight: figures.weight,
        entitled_us: figures.owed_ns / 1000,
        used_us: figures.used_ns / 1000,
        donated_us: figures.donated_ns / 1000,
        limited_us: figures.limited_ns / 1000,
        waited_us: figures.waited_ns / 1000,
        queued: figures.queued,
    }
}

pub fn requests(statistics: &Statistics) -> BTreeMap<String, Requests> {
    let kinds = OpKind::ALL.into_iter();
    let of_kind = |kind: OpKind| {
        let s = statistics.summary(kind)?;
        let requests = Requests {
            requests: s.requests,
            merged: s.merged,
            errors: s.errors,
            bytes: s.bytes,
            queue_us: s.queue_us,
            service_us: s.service_us,
        };
        Some((kind.name().to_string(), requests))
    };
    kinds.filter_map(of_kind).collect()
}

pub fn job(job: &blockyard_yard::Job) -> Job {
    let (done, total) = job.progress();
    let (state, error) = match job.state() {
        blockyard_yard::JobState::Running => (JobState::Running, None),
        blockyard_yard::JobState::Done => (JobState::Done, None),
        blockyard_yard::JobState::Failed(e) => {
            (JobState::Failed, Some(format!("{:#}", anyhow::Error::new(e))))
        }
    };
    Job {
        number: job.number(),
        disk: job.disk().into(),
        kind: job.kind().to_string(),
        state,
        done,
        total,
        error,
    }
}
