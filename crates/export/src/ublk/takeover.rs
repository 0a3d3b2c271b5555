//! Takes over devices after their server has died.
//!
//! What must hold: a device is never taken over for another disk (see [`super::note`]), because a
//! file system on it would read and write the wrong disk.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use blockyard_disk::Disk;
use blockyard_image::SECTOR;
use blockyard_ring::parcel::Parcel;
use blockyard_ring::ublk::abi::{self, DeviceInfo, Params};
use blockyard_ring::ublk::{CLASS, Control, NumberLock};
use rustix::io::Errno;

use super::files::{has_files, memory_alignment};
use super::note::is_ours;
use super::{MAX_WAIT, UblkError, UblkOptions};
use crate::export::GRACE;

/// The kind of the parcels of a hand-over.
pub const PARCELS: &str = "ublk";

/// Returns what the next server needs to continue a device.
pub(super) fn parcel(id: u32) -> Parcel {
    Parcel { bytes: id.to_le_bytes().to_vec(), fds: Vec::new() }
}

/// Returns the number of the device that another server has handed over.
pub fn number_in(parcel: &Parcel) -> Option<u32> {
    Some(u32::from_le_bytes(parcel.bytes.as_slice().try_into().ok()?))
}

/// Checks that the image can keep the properties that the kernel got when the device was made.
/// Returns whether each write must be durable before its answer.
pub(super) fn check(disk: &Disk, zero_copy: bool, params: &Params) -> io::Result<bool> {
    let refuse = |what: &str| Err(io::Error::other(what.to_string()));
    if zero_copy && !has_files(disk) {
        return refuse(
            "it uses zero copy, and the image cannot (it must be in files of this host)",
        );
    }
    if zero_copy && memory_alignment(disk).is_some_and(|needed| params.memory_alignment() < needed)
    {
        return refuse("the image needs a larger alignment of memory than the device has");
    }
    if disk.options().read_only && params.basic.attrs & abi::ATTR_READ_ONLY == 0 {
        return refuse("it is writable, and the disk is read-only now");
    }
    let (bytes, image) = (params.basic.sectors * SECTOR, disk.capacity() / SECTOR * SECTOR);
    if image < bytes {
        return refuse(&format!("it has {bytes} bytes, and the image has {image} now"));
    }
    if 1 << params.basic.logical_shift < disk.source().logical_block() {
        return refuse("its blocks are smaller than the image's");
    }
    // The kernel sends no flushes to a device without a write cache, so each write must be durable.
    let flushes = params.basic.attrs & abi::ATTR_VOLATILE_CACHE != 0;
    Ok(!flushes || !disk.options().cache.write_back())
}

/// A number that no device has. A server holds the lock on this number while it adds a device.
const ADDING: u32 = u32::MAX;

/// Returns the device that a server of this disk left, and the lock on its number. Returns no
/// device if this server must make one.
pub(super) fn find(
    control: &mut Control,
    options: &UblkOptions,
) -> Result<(Option<DeviceInfo>, Option<NumberLock>), UblkError> {
    if let Some(id) = options.id {
        let lock = lock(id);
        return match wait_left(control, id, options, lock.is_some())? {
            Some(info) if !is_ours(&info, options) => Err(UblkError::Another { id }),
            found => Ok((found, lock)),
        };
    }
    let is_left = |info: &DeviceInfo| {
        is_ours(info, options)
            && !is_removed(info)
            && (info.state == abi::S_QUIESCED || !is_alive(info))
    };
    for id in listed() {
        if !control.info(id).is_ok_and(|info| is_left(&info)) {
            continue;
        }
        // Another server of the disk may have taken the device over before this server got the
        // lock.
        let lock = lock(id);
        if control.info(id).is_ok_and(|info| is_left(&info))
            && let Some(info) = wait_left(control, id, options, lock.is_some())?
        {
            return Ok((Some(info), lock));
        }
    }
    Ok((None, None))
}

/// Locks the number of a device, so that only one process at a time makes, takes over or removes
/// the device. Returns `None` if another process keeps the lock too long, or if this system has no
/// such locks.
///
/// A process that lets the driver choose the number can lock that number only after the device is
/// added. Until then the process holds the lock of [`ADDING`]. So if a device is added and not
/// locked, no process is about to start it.
pub(super) fn lock(id: u32) -> Option<NumberLock> {
    lock_within(id, MAX_WAIT)
}

/// The same with another limit.
pub(super) fn lock_within(id: u32, limit: Duration) -> Option<NumberLock> {
    wait_for(limit, || {
        let adding = NumberLock::try_new(ADDING)?;
        if adding.is_some() { NumberLock::try_new(id) } else { Ok(None) }
    })
}

/// Calls `add`, which adds a device and lets the driver choose the number, and locks that number.
pub(super) fn lock_new<E>(add: impl FnOnce() -> Result<u32, E>) -> Result<Option<NumberLock>, E> {
    let _adding = wait_for(MAX_WAIT, || NumberLock::try_new(ADDING));
    add().map(|id| wait_for(MAX_WAIT, || NumberLock::try_new(id)))
}

fn wait_for(
    limit: Duration,
    mut lock: impl FnMut() -> io::Result<Option<NumberLock>>,
) -> Option<NumberLock> {
    let start = Instant::now();
    while start.elapsed() < limit {
        match lock() {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => {
                tracing::debug!("cannot lock the number of a device: {e}");
                return None;
            }
        }
    }
    tracing::debug!(
        "another process has held the lock on a device's number for {} s",
        limit.as_secs()
    );
    None
}

/// Returns whether a device was removed but a process still has it open. The driver then keeps its
/// number, but does not list it.
pub(super) fn is_removed(info: &DeviceInfo) -> bool {
    let class = Path::new(CLASS);
    info.state == abi::S_DEAD && class.exists() && !class.join(format!("ublkc{}", info.id)).exists()
}

/// Waits for the end of a server that was killed. Returns `None` if the device does not exist.
/// `locked`: this process holds the device's lock, so no other process is making the device.
fn wait_left(
    control: &mut Control,
    id: u32,
    options: &UblkOptions,
    locked: bool,
) -> Result<Option<DeviceInfo>, UblkError> {
    let error = |what, source| UblkError::Device { id, what, source };
    let start = Instant::now();
    loop {
        let info = match control.info(id) {
            Ok(info) => info,
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NODEV | Errno::NOENT)) => {
                return Ok(None);
            }
            Err(e) => return Err(error("cannot read its state", e)),
        };
        match info.state {
            abi::S_QUIESCED => return Ok(Some(info)),
            // The number becomes free when the device is closed. `Ublk::add_when_free` waits for
            // that.
            abi::S_DEAD if is_removed(&info) => return Ok(None),
            // The device belongs to another disk, and a server of that disk may be about to start
            // it.
            abi::S_DEAD if !is_ours(&info, options) => return Err(UblkError::Another { id }),
            // The device was added but never started, because its server died first.
            abi::S_DEAD if !is_alive(&info) && locked => {
                let deleted = control.delete(&info);
                if start.elapsed() > MAX_WAIT {
                    let why = deleted.err().unwrap_or_else(|| Errno::BUSY.into());
                    return Err(error("cannot remove the device that a server left", why));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            abi::S_DEAD if start.elapsed() > MAX_WAIT => {
                return Err(error("another process is making or removing it", Errno::BUSY.into()));
            }
            _ if is_alive(&info) || start.elapsed() > MAX_WAIT => {
                return Err(UblkError::Served { id, server: info.server });
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Returns whether this kernel needs a thread for each vacant queue before a takeover (see
/// `blockyard_ring::ublk::fill_vacant`).
pub(super) fn has_vacant_queues() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .is_ok_and(|release| leaves_vacant(&release))
}

fn leaves_vacant(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return false };
    ((6, 7)..(6, 15)).contains(&(major, minor))
}

/// Starts the recovery, after which the driver accepts a new server. Waits while the driver still
/// cancels the requests of the last server.
pub(super) fn begin(control: &mut Control, info: &DeviceInfo) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let begun = control.start_recovery(info);
        match begun.as_ref().map_err(Errno::from_io_error) {
            Err(Some(Errno::BUSY)) if start.elapsed() < MAX_WAIT => {
                std::thread::sleep(Duration::from_millis(10))
            }
            // Linux before 6.7 refuses the recovery if no queue of a quiesced device has had a
            // server since the last recovery. That happens if a server was killed during its
            // takeover. In this case the driver has no state of a server, so the recovery is not
            // needed.
            Err(Some(Errno::INVAL)) if is_quiesced(control, info.id) => return Ok(()),
            _ => return begun,
        }
    }
}

/// Asks the driver to take the device from this server. Fails if that takes until `deadline`.
/// Without this command of the kernel, the device loses its server only when this process ends.
pub(super) fn quiesce(
    control: &mut Control,
    info: &DeviceInfo,
    deadline: Instant,
) -> io::Result<()> {
    // For the driver 0 is no limit.
    let left = deadline.saturating_duration_since(Instant::now()).clamp(GRACE, MAX_WAIT);
    control.quiesce(info, left.as_millis() as u64)
}

/// Waits until the driver has seen that this server has closed the device. Before that, another
/// server would find a device that is served. Returns false if it takes too long.
///
/// The quiesce command takes back the commands that wait for a request. A request that was in
/// flight then leaves such a command when it is committed, and the command keeps the device open.
/// So the quiesce command is repeated.
pub(super) fn wait_quiesced(control: &mut Control, info: &DeviceInfo, deadline: Instant) -> bool {
    let now = Instant::now();
    let deadline = deadline.clamp(now + GRACE, now + MAX_WAIT);
    let mut pause = Duration::from_millis(1);
    while control.info(info.id).is_ok_and(|info| info.state == abi::S_LIVE) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(50));
        let _ = control.quiesce(info, pause.as_millis() as u64);
    }
    true
}

fn is_quiesced(control: &mut Control, id: u32) -> bool {
    control
        .info(id)
        .is_ok_and(|info| info.state == abi::S_QUIESCED && info.flags & abi::F_USER_RECOVERY != 0)
}

fn is_alive(info: &DeviceInfo) -> bool {
    let pid = rustix::process::Pid::from_raw(info.server.max(0));
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

fn listed() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(CLASS) else { return Vec::new() };
    let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(|entry| number(entry.ok()?.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use blockyard_disk::{DiskOptions, Source};
    use blockyard_image::{CacheMode, ChainOptions};

    use super::super::params::params;
    use super::*;

    fn disk(bytes: u64, read_only: bool, cache: CacheMode) -> Disk {
        let options = DiskOptions {
            name: "disk".into(),
            serial: String::new(),
            read_only,
            cache,
            filters: Vec::new(),
            on_enospc: Default::default(),
        };
        let source = Source::open(&ChainOptions::new(format!("ram:{bytes}"))).unwrap();
        Disk::new(options, source)
    }

    /// A file system on the device relies on what its kernel heard when the device was made.
    #[test]
    fn a_disk_that_cannot_keep_its_promises_takes_no_device_over() {
        let before = disk(1 << 20, false, CacheMode::None);
        let device = params(&before, 1 << 20, None);
        assert!(!check(&before, false, &device).unwrap(), "flushes make writes durable");
        let why = |disk: &Disk, zero_copy, params: &Params| {
            check(disk, zero_copy, params).unwrap_err().to_string()
        };
        let read_only = disk(1 << 20, true, CacheMode::None);
        let expected = "it is writable, and the disk is read-only now";
        assert_eq!(why(&read_only, false, &device), expected);
        assert!(check(&read_only, false, &params(&read_only, 1 << 20, None)).is_ok());
        let smaller = disk((1 << 20) - 512, false, CacheMode::None);
        let expected = "it has 1048576 bytes, and the image has 1048064 now";
        assert_eq!(why(&smaller, false, &device), expected);
        assert!(check(&disk(2 << 20, false, CacheMode::None), false, &device).is_ok());
        let mut fine = device;
        fine.basic.logical_shift = 0;
        assert_eq!(why(&before, false, &fine), "its blocks are smaller than the image's");
        assert!(why(&before, true, &device).starts_with("it uses zero copy"), "in memory");
    }

    #[test]
    fn writes_are_durable_if_the_kernel_or_the_disk_has_no_write_cache() {
        let (cached, through) = (CacheMode::None, CacheMode::Writethrough);
        for (made, now, durable) in [
            (cached, cached, false),
            (cached, through, true),
            // The kernel sends no flushes to this device.
            (through, cached, true),
            (through, through, true),
        ] {
            let device = params(&disk(1 << 20, false, made), 1 << 20, None);
            let checked = check(&disk(1 << 20, false, now), false, &device).unwrap();
            assert_eq!(checked, durable, "{made} {now}");
        }
    }

    #[test]
    fn the_next_server_gets_the_number_of_the_device() {
        assert_eq!(number_in(&parcel(7)), Some(7));
        for bytes in [vec![], vec![1, 2, 3], vec![0; 5]] {
            assert_eq!(number_in(&Parcel { bytes, fds: Vec::new() }), None);
        }
    }

    #[test]
    fn kernels_that_leave_vacant_queues_are_known_by_their_release() {
        for (release, leaves) in [
            ("6.1.0-42-cloud-amd64", false),
            ("6.6.114", false),
            ("6.7.0", true),
            ("6.12.107+deb13-cloud-amd64", true),
            ("6.14-rc1", true),
            ("6.15.0", false),
            ("7.3.4+deb13-cloud-amd64", false),
            ("", false),
        ] {
            assert_eq!(leaves_vacant(release), leaves, "{release}");
        }
    }
}
