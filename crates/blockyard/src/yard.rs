//! The disks that a process serves.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_disk::{Carried, OpKind};
use blockyard_export::Reactors;
use blockyard_image::{ChainOptions, Format};
use blockyard_storage::targets::{TargetEnd, TargetError};
use blockyard_yard::{Activation, Change, DiskSettings, Shares, Way, YardError};

use crate::disk::{Content, Disk};
use crate::error::{Error, ErrorKind};
use crate::exports::{NbdServers, One};
use crate::handover::Inheritance;

/// The set of disks that this process serves, and the threads that serve them.
///
/// Calls block until they are done. Dropping the yard ends its disks, like [`Yard::close`].
pub struct Yard {
    pub(crate) yard: blockyard_yard::Yard,
    reactors: Arc<Reactors>,
    pub(crate) servers: NbdServers,
    /// What the process before this one has handed over.
    pub(crate) inherited: Inheritance,
    /// The ends of targets that have not ended, with the names of their disks. A disk has several
    /// if a target did not start in time, and another one was tried.
    targets: Mutex<Vec<(String, TargetEnd)>>,
}

/// A disk that another process has now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HandedOver {
    /// The disk's name.
    pub name: String,
    /// How long its requests waited.
    pub pause: Duration,
}

/// What a disk has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Statistics {
    /// Reads.
    pub read: Counts,
    /// Writes.
    pub write: Counts,
    /// Flushes.
    pub flush: Counts,
    /// Discards.
    pub discard: Counts,
    /// Requests to write zeroes.
    pub write_zeroes: Counts,
}

/// Counts of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Counts {
    /// Number of requests.
    pub requests: u64,
    /// Number of requests that failed.
    pub errors: u64,
    /// Bytes of the requests that succeeded.
    pub bytes: u64,
    /// Median time that a request waited for its share or its limit.
    pub queue: Duration,
    /// Median time in the target and below.
    pub service: Duration,
}

/// The end of a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Ended {
    /// Whether all answered writes are durable.
    pub is_flushed: bool,
    /// The last counts.
    pub statistics: Statistics,
}

/// Size of a disk in bytes, before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size before.
    pub old: u64,
    /// The size now.
    pub new: u64,
}

impl Yard {
    /// Starts a yard without disks. `reactors`: number of threads that serve requests, at least 1.
    /// One serves several hundred thousand requests a second.
    pub fn start(reactors: usize) -> Result<Self, Error> {
        let failed = |e| Error::new(ErrorKind::Start, "cannot start the reactors (io_uring)", e);
        let reactors = Arc::new(Reactors::start(reactors, &[]).map_err(failed)?);
        let shares = Shares::new(true, Vec::new(), BTreeMap::new());
        let yard = blockyard_yard::Yard::start(reactors.clone(), shares).map_err(failed)?;
        let (servers, inherited, targets) = Default::default();
        Ok(Yard { yard, reactors, servers, inherited, targets })
    }

    /// Opens a disk and starts its exports. After an error nothing of it remains.
    pub fn serve(&self, disk: Disk) -> Result<(), Error> {
        self.serve_with(disk, None)
    }

    /// Like `serve`. `carried`: what the disk has from another process, or from before.
    pub(crate) fn serve_with(
        &self,
        disk: Disk,
        carried: Option<Arc<Carried>>,
    ) -> Result<(), Error> {
        // A target that is opened runs code, and may change its files. The yard checks the name
        // again, because another thread may serve a disk meanwhile.
        if self.yard.info(&disk.name).is_some() {
            return Err(YardError::NameTaken { disk: disk.name }.into());
        }
        let exports = disk.exports.iter().map(|export| -> Arc<dyn Way> {
            let (servers, inherited) = (self.servers.clone(), self.inherited.clone());
            Arc::new(One { export: export.clone(), queues: disk.queues, servers, inherited })
        });
        let ways: Vec<_> = exports.collect();
        let mut image = disk.image_options();
        let (knobs, on_enospc, name) = (disk.knobs.clone(), disk.on_enospc, disk.name.clone());
        match disk.content {
            Content::Image(_) => {}
            Content::Target(target) => {
                let opened = target.open(disk.cache);
                // A target that has not started may still run, and have its files.
                self.note_end(&name, opened.as_ref().map_or_else(TargetError::end, |t| t.end()));
                let given = opened?;
                image = ChainOptions { format: Some(Format::Raw), given: Some(given), ..image };
            }
        }
        let settings = DiskSettings {
            serial: disk.serial.unwrap_or_else(|| name.clone()),
            name,
            image,
            activation: Activation::Start,
            filters: Vec::new(),
            on_enospc,
            device: None,
            group: disk.group,
            knobs,
            carried,
            ways,
        };
        Ok(self.yard.add(settings)?)
    }

    /// Ends the exports of a disk, flushes and closes it.
    pub fn remove(&self, name: &str) -> Result<Ended, Error> {
        let ended = ended(&self.yard.remove(name)?);
        self.note_end(name, None);
        Ok(ended)
    }

    fn targets(&self) -> MutexGuard<'_, Vec<(String, TargetEnd)>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the end of a target until it has ended.
    fn note_end(&self, name: &str, end: Option<TargetEnd>) {
        let mut targets = self.targets();
        targets.retain(|(_, end)| !end.wait(Duration::ZERO));
        targets.extend(end.map(|end| (name.into(), end)));
    }

    /// Ends all disks. Returns whether their targets have ended, too.
    pub(crate) fn close_all(self, limit: Duration) -> bool {
        let targets = std::mem::take(&mut *self.targets());
        drop(self);
        let until = Instant::now() + limit;
        targets.iter().all(|(_, end)| end.wait(until.saturating_duration_since(Instant::now())))
    }

    /// Waits for the end of the target of a disk that has ended.
    pub(crate) fn target_ended(&self, name: &str, limit: Duration) -> io::Result<()> {
        let of_disk: Vec<_> = self.targets().extract_if(.., |(disk, _)| disk == name).collect();
        let until = Instant::now() + limit;
        let has_ended = |end: &TargetEnd| end.wait(until.saturating_duration_since(Instant::now()));
        let left: Vec<_> = of_disk.into_iter().filter(|(_, end)| !has_ended(end)).collect();
        if left.is_empty() {
            return Ok(());
        }
        self.targets().extend(left);
        let what = format!("the target of disk \"{name}\" does not end: its thread is busy");
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    }

    /// Makes all answered writes of a disk durable.
    pub fn flush(&self, name: &str) -> Result<(), Error> {
        Ok(self.yard.flush(name)?)
    }

    /// Adopts the present size of a disk, and notifies its clients. None: it has not changed.
    pub fn resize(&self, name: &str) -> Result<Option<Resized>, Error> {
        let resized = self.yard.refresh(name)?;
        Ok(resized.map(|size| Resized { old: size.old, new: size.new }))
    }

    /// Changes the share and the limits of a disk in use to those of `like`. Its other settings
    /// have no effect.
    pub fn limit(&self, name: &str, like: &Disk) -> Result<(), Error> {
        let change = Change { knobs: Some(like.knobs.clone()), ..Change::default() };
        Ok(self.yard.change(name, change)?)
    }

    /// Sets the weight, the limits and the guarantees of a group to those of `like`, also for disks
    /// in use. A group that was never set has the weight 100, and no limits.
    pub fn limit_group(&self, name: impl Into<String>, like: &Disk) {
        self.yard.set_groups(BTreeMap::from([(name.into(), like.knobs.clone())]));
    }

    /// Lets the requests of a disk try again that wait for space on the host
    /// ([`Disk::wait_for_space`]). Returns their number.
    pub fn resume(&self, name: &str) -> Result<u64, Error> {
        let (_, requests) = self.yard.resume(name)?;
        Ok(requests)
    }

    /// Returns the counts of a disk.
    pub fn statistics(&self, name: &str) -> Result<Statistics, Error> {
        Ok(statistics(&self.yard.report(name)?.statistics))
    }

    /// Returns the block device of this host that a disk's ublk export has made.
    pub fn device(&self, name: &str) -> Result<Option<PathBuf>, Error> {
        Ok(self.yard.report(name)?.device)
    }

    /// Returns the names of the disks.
    pub fn disks(&self) -> Vec<String> {
        self.yard.list().into_iter().map(|disk| disk.name).collect()
    }

    /// Ends all disks: answers what is in flight, flushes and closes them. Returns each with its
    /// name.
    pub fn close(self) -> Vec<(String, Ended)> {
        let ended = self.yard.close().iter().map(|disk| (disk.name.clone(), ended(disk))).collect();
        self.reactors.stop();
        ended
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        self.yard.close();
        self.reactors.stop();
    }
}

fn ended(disk: &blockyard_yard::Ended) -> Ended {
    Ended { is_flushed: disk.is_flushed, statistics: statistics(&disk.statistics) }
}

fn statistics(counted: &blockyard_disk::Statistics) -> Statistics {
    let of = |kind| {
        let Some(summary) = counted.summary(kind) else { return Counts::default() };
        let time = |us: [f64; 3]| Duration::from_secs_f64(us[0] / 1e6);
        Counts {
            requests: summary.requests,
            errors: summary.errors,
            bytes: summary.bytes,
            queue: time(summary.queue_us),
            service: time(summary.service_us),
        }
    };
    Statistics {
        read: of(OpKind::Read),
        write: of(OpKind::Write),
        flush: of(OpKind::Flush),
        discard: of(OpKind::Discard),
        write_zeroes: of(OpKind::WriteZeroes),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{Device, Lent, Limits, Shape, Target};

    struct Nothing;

    impl Device for Nothing {
        async fn read(&self, _: u64, _: Lent) -> io::Result<()> {
            Ok(())
        }

        async fn write(&self, _: u64, _: Lent) -> io::Result<()> {
            Ok(())
        }

        async fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Fails to serve a target that blocks its thread. Returns what lets it go on.
    fn fail(yard: &Yard) -> mpsc::Sender<()> {
        let (release, held) = mpsc::channel();
        let shape = Shape { size: 4096, granule: 4096 };
        let target = Target::device("late", shape, async move |_, _| {
            let _ = held.recv();
            Ok(Nothing)
        });
        let limits = Limits { start: Duration::ZERO, ..Limits::default() };
        let failed = yard.serve(Disk::target("a", target.limits(limits)));
        let error = failed.unwrap_err().to_string();
        assert_eq!(error, "target late: it cannot start: it was not ready in time");
        release
    }

    #[test]
    fn a_yard_forgets_the_nbd_servers_that_have_ended() {
        let yard = Yard::start(1).unwrap();
        let folder = std::env::temp_dir();
        for number in 0..3 {
            let shape = Shape { size: 4096, granule: 4096 };
            let target = Target::device("a", shape, async |_, _| Ok(Nothing));
            let socket = format!("blockyard-servers-{}-{number}", std::process::id());
            yard.serve(Disk::target("a", target).nbd_unix(folder.join(socket))).unwrap();
            let servers = yard.servers.lock().unwrap();
            assert_eq!(servers.len(), 1);
            drop(servers);
            yard.remove("a").unwrap();
        }
    }

    #[test]
    fn a_target_that_starts_too_late_counts_until_it_has_ended() {
        let yard = Yard::start(1).unwrap();
        let release = fail(&yard);
        yard.target_ended("a", Duration::ZERO).unwrap_err();
        drop(release);
        yard.target_ended("a", Duration::from_secs(60)).unwrap();
        let release = fail(&yard);
        assert!(!yard.close_all(Duration::ZERO), "its target has its files");
        drop(release);
    }
}
