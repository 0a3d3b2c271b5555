//! Reports of what happens to a disk, for programs that follow its events.
//!
//! In: clients that connect and disconnect; a disk that is paused, resumed or poisoned. Out: calls
//! of the disk's [`DiskObserver`], if it has one.
//!
//! What must hold: a report costs a request nothing but a flag. One disk has at most one report of
//! its state that is not handled yet, so that no guest floods the observer.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A client of a disk, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientId {
    /// The client for people: `pid 4711`, `192.0.2.7:40312`, `domain 3`.
    pub description: String,
    pub pid: Option<i32>,
    pub program: Option<String>,
}

/// Follows what happens to disks. Reactors call it, so no call may block.
pub trait DiskObserver: Send + Sync {
    /// The disk may be paused, resumed or poisoned now. `disk`: its name. Must not allocate:
    /// requests call it. Returns false if the report is lost. Else the observer calls
    /// [`Disk::handled`](crate::Disk::handled) before it reads the disk's state.
    fn changed(&self, disk: &Arc<str>) -> bool;

    /// `export`: the kind of export, such as `nbd`.
    fn connected(&self, disk: &str, export: &'static str, client: &ClientId);

    fn disconnected(&self, disk: &str, export: &'static str, client: &ClientId, why: &str);
}

/// The observer of one disk.
pub(crate) struct Observed {
    pub observer: Arc<dyn DiskObserver>,
    disk: Arc<str>,
    /// A report of the state is not handled yet.
    is_reported: AtomicBool,
}

impl fmt::Debug for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observed")
    }
}

impl Observed {
    /// Returns the observer of the disk with this name.
    pub fn new(observer: Arc<dyn DiskObserver>, disk: &str) -> Self {
        Observed { observer, disk: disk.into(), is_reported: AtomicBool::new(false) }
    }

    /// Reports that the disk's state may have changed.
    pub fn report_change(&self) {
        if !self.is_reported.swap(true, Ordering::SeqCst) && !self.observer.changed(&self.disk) {
            self.is_reported.store(false, Ordering::SeqCst);
        }
    }

    /// Lets the next change of the state be reported.
    pub fn handled(&self) {
        self.is_reported.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use blockyard_image::CacheMode;

    use super::*;
    use crate::backend::Source;
    use crate::disk::{Disk, DiskOptions};

    /// Counts the reports. `takes`: whether the observer takes the next report.
    struct Reports {
        count: Mutex<u32>,
        takes: AtomicBool,
    }

    impl DiskObserver for Reports {
        fn changed(&self, _: &Arc<str>) -> bool {
            *self.count.lock().unwrap() += 1;
            self.takes.load(Ordering::SeqCst)
        }

        fn connected(&self, _: &str, _: &'static str, _: &ClientId) {}

        fn disconnected(&self, _: &str, _: &'static str, _: &ClientId, _: &str) {}
    }

    fn observed(takes: bool) -> (Arc<Disk>, Arc<Reports>) {
        let options = DiskOptions {
            name: "observed".into(),
            serial: String::new(),
            read_only: false,
            cache: CacheMode::None,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let disk = Arc::new(Disk::new(options, Source::Null { size: 512 }));
        let reports = Arc::new(Reports { count: Mutex::default(), takes: takes.into() });
        disk.observe(reports.clone());
        (disk, reports)
    }

    #[test]
    fn a_change_is_reported_again_only_after_it_was_handled() {
        let (disk, reports) = observed(true);
        disk.report_change();
        disk.report_change();
        assert_eq!(*reports.count.lock().unwrap(), 1);
        disk.handled();
        disk.report_change();
        assert_eq!(*reports.count.lock().unwrap(), 2);
    }

    #[test]
    fn the_next_change_after_a_lost_report_is_reported() {
        let (disk, reports) = observed(false);
        disk.report_change();
        reports.takes.store(true, Ordering::SeqCst);
        disk.report_change();
        assert_eq!(*reports.count.lock().unwrap(), 2);
    }

    #[test]
    fn a_disk_reports_once_that_it_is_poisoned() {
        let (disk, reports) = observed(true);
        let error = io::Error::other("broken");
        disk.poison("a flush", &error);
        disk.handled();
        disk.poison("a flush", &error);
        assert_eq!(*reports.count.lock().unwrap(), 1);
    }
}
