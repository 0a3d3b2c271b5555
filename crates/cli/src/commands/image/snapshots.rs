//! Lists of snapshots, in the format of qemu-img.

use blockyard_image::qcow2::snapshot_table::Snapshot;
use blockyard_ring::host::local_time;
use serde::Serialize;

use super::{printable, size};

const NANOSECONDS: u64 = 1_000_000_000;

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    icount: Option<u64>,
    vm_clock_nsec: u64,
    name: String,
    date_sec: u32,
    date_nsec: u32,
    vm_clock_sec: u64,
    id: String,
    vm_state_size: u64,
}

impl SnapshotFields {
    pub fn of(snapshot: &Snapshot) -> Self {
        // The first 8 bytes of the extra data. All ones mean that there is no count.
        let icount = snapshot.extra.first_chunk::<8>().map(|bytes| u64::from_be_bytes(*bytes));
        SnapshotFields {
            icount: icount.filter(|count| *count != u64::MAX),
            vm_clock_nsec: snapshot.vm_clock % NANOSECONDS,
            name: snapshot.name(),
            date_sec: snapshot.seconds,
            date_nsec: snapshot.nanoseconds,
            vm_clock_sec: snapshot.vm_clock / NANOSECONDS,
            id: snapshot.id(),
            vm_state_size: snapshot.vm_state_size,
        }
    }

    fn line(&self) -> String {
        let [year, month, day, hour, minute, second] =
            local_time(self.date_sec.into()).unwrap_or_default();
        let date = format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}");
        let (seconds, milliseconds) = (self.vm_clock_sec, self.vm_clock_nsec / 1_000_000);
        let clock = format!(
            "{:04}:{:02}:{:02}.{milliseconds:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        );
        let icount = self.icount.map_or("--".into(), |count| count.to_string());
        row(&self.id, &self.name, &size::human(self.vm_state_size), &date, &clock, &icount)
    }
}

fn row(id: &str, name: &str, size: &str, date: &str, clock: &str, icount: &str) -> String {
    let (id, name) = (printable(id), printable(name));
    format!("{id:<7} {name:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}")
}

/// Returns the list as lines of text, or nothing if there are no snapshots.
pub fn lines(snapshots: &[SnapshotFields]) -> Vec<String> {
    if snapshots.is_empty() {
        return Vec::new();
    }
    let head = ["Snapshot list:".into(), row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT")];
    head.into_iter().chain(snapshots.iter().map(SnapshotFields::line)).collect()
}
