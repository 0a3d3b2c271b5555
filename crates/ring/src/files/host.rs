//! Calls to the host other than reads and writes: locks, geometry, block-device ioctls.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Resource, Rlimit};

use crate::files::small_file;
use crate::mem::segments::Segments;

pub use crate::files::topology::{Geometry, Topology};
use crate::files::topology::{device_folder, lowest_device, read_number};
pub use crate::processes::holders::{Holder, holders};

/// Maximum number of iovec entries in a system call (IOV_MAX).
const IOV_MOST: usize = 1024;

/// Returns the size in bytes of a regular file or a block device.
pub fn file_size(fd: impl AsFd) -> io::Result<u64> {
    let stat = rustix::fs::fstat(fd.as_fd())?;
    match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
        rustix::fs::FileType::RegularFile => Ok(stat.st_size as u64),
        // Seeking to the end needs no ioctl. The file position is not used elsewhere.
        rustix::fs::FileType::BlockDevice => {
            Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?)
        }
        kind => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("it is {}, not a file or block device", small_file::name_of(kind)),
        )),
    }
}

/// Reads the geometry of a block device from sysfs and statx: of `fd` itself if it is one, else of
/// the device under the file `fd`.
pub fn geometry(fd: impl AsFd) -> io::Result<Geometry> {
    Ok(geometry_on(&fd, &*Topology::of(&fd)?))
}

/// Returns the geometry of the file or block device `fd`, which lies on a device with `topology`.
pub fn geometry_on(fd: impl AsFd, topology: &Topology) -> Geometry {
    let own = topology.device;
    let logical = own.logical_block;
    let (direct_memory, direct_offset) = direct_alignment(fd.as_fd()).unwrap_or((logical, logical));
    Geometry { direct_memory, direct_offset, ..own }
}

/// Limits of one request to a block device. The kernel splits larger ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    pub bytes: u64,
    /// Maximum number of memory segments, and of bytes of each.
    pub segments: u16,
    pub segment_bytes: u32,
}

/// Returns the limits, or `None` if `device` is no block device or the kernel does not report them.
pub fn request_limits(device: impl AsFd) -> Option<RequestLimits> {
    let stat = rustix::fs::fstat(device).ok()?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::BlockDevice {
        return None;
    }
    let queue = device_folder(stat.st_rdev)?.join("queue");
    let read = |name: &str| read_number(&queue.join(name)).filter(|n| *n > 0);
    Some(RequestLimits {
        bytes: u64::from(read("max_sectors_kb")?) << 10,
        segments: read("max_segments")?.min(u16::MAX.into()) as u16,
        segment_bytes: read("max_segment_size")?,
    })
}

/// Returns the block device under a file (or the file itself, if it is one) as "major:minor", and
/// whether it is rotational. For a partition it is the whole disk, because partitions share one
/// queue. For a mapped device on one other device (a logical volume, dm-crypt) it is that one. A
/// file system without a block device (tmpfs, NFS, Btrfs), and a mapped device on several others
/// (RAID, multipath), counts as a device of its own.
pub fn backing_device(fd: impl AsFd) -> io::Result<(String, bool)> {
    let stat = rustix::fs::fstat(fd.as_fd())?;
    let is_device =
        rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice;
    let dev = if is_device { stat.st_rdev } else { stat.st_dev };
    let own = format!("{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let Some(folder) = device_folder(dev).map(lowest_device) else { return Ok((own, false)) };
    let whole = std::fs::read_to_string(folder.join("dev"))
        .map_or(own, |numbers| numbers.trim().to_string());
    // Ignore the flag of a virtual disk, because it reports rotational by default.
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let is_virtual = name.starts_with("vd") || name.starts_with("xvd");
    Ok((whole, !is_virtual && read_number(&folder.join("queue/rotational")) == Some(1)))
}

/// Returns the (memory, offset) alignment that O_DIRECT requires, if the kernel reports it (Linux
/// 6.1). (0, 0): O_DIRECT is not supported.
fn direct_alignment(fd: impl AsFd) -> Option<(u32, u32)> {
    // SAFETY: an all-zero statx is a valid value of this plain C struct.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let raw = fd.as_fd().as_raw_fd();
    // SAFETY: with AT_EMPTY_PATH an empty path refers to `raw`; the kernel writes only to `stat`,
    // which is ours.
    let rc = unsafe {
        libc::statx(raw, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &mut stat)
    };
    (rc == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// Writes `segments` at `offset`, on this thread, without io_uring. Returns the number of bytes
/// written (pwritev2).
pub(crate) fn write_at(
    fd: impl AsFd,
    segments: &Segments,
    offset: u64,
    flags: libc::c_int,
) -> io::Result<usize> {
    let iov = segments.iovecs();
    let count = iov.len().min(IOV_MOST) as libc::c_int;
    // SAFETY: the entries point into memory that `segments` keeps alive; the call only reads it.
    let n = unsafe {
        libc::pwritev2(fd.as_fd().as_raw_fd(), iov.as_ptr(), count, offset as libc::off_t, flags)
    };
    if n >= 0 { Ok(n as usize) } else { Err(io::Error::last_os_error()) }
}

/// Marks this thread, and those that it starts, as I/O flushers (PR_SET_IO_FLUSHER). Their memory
/// allocations then never wait for writeback that depends on them.
pub fn set_io_flusher() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: the arguments are plain numbers.
    let rc = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Checks whether a block device can be opened exclusively. `ResourceBusy`: the device is mounted,
/// or another process has it open exclusively.
pub fn claim(device: &Path) -> io::Result<()> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(device, flags, rustix::fs::Mode::empty()).map(drop)?)
}

/// The process at the other end of a Unix socket, as it was when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// None: the process has no number in this PID namespace.
    pub process: Option<i32>,
    pub user: u32,
}

/// Returns the peer of a Unix socket, or `None` for other sockets.
pub fn peer(socket: impl AsFd) -> Option<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (fd, to) = (socket.as_fd().as_raw_fd(), (&raw mut peer).cast());
    // SAFETY: the kernel writes at most `len` bytes, the size of `peer`, which is ours. (libc,
    // because rustix cannot represent a process number of 0.)
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len) };
    // The kernel returns the user -1 for sockets without a peer process, such as those of TCP.
    let is_known = rc == 0 && peer.uid != u32::MAX;
    is_known.then(|| Peer { process: Some(peer.pid).filter(|pid| *pid > 0), user: peer.uid })
}

/// Waits for the end of a process (a pidfd). Returns whether it has ended.
pub fn has_ended(process: impl AsFd, limit: Duration) -> io::Result<bool> {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&time)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Returns the name of the program that a process runs, as the kernel knows it: at most 15 bytes.
pub fn program_of(process: i32) -> Option<String> {
    let name = std::fs::read(format!("/proc/{process}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_string())
}

/// Returns the supplementary groups of the peer of a Unix socket at the time when it connected.
/// Returns no group if the kernel does not know them.
pub fn peer_groups(socket: impl AsFd) -> Vec<u32> {
    // The kernel's maximum, NGROUPS_MAX.
    let mut groups = vec![0_u32; 65536];
    let mut len = (groups.len() * size_of::<u32>()) as libc::socklen_t;
    let (fd, to) = (socket.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
    // SAFETY: the kernel writes at most `len` bytes, the size of `groups`, which is ours.
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, &mut len) };
    groups.truncate(if rc == 0 { len as usize / size_of::<u32>() } else { 0 });
    groups
}

/// Returns the number of the group with this name, or `None` if there is none.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: an all-zero group is a valid value of this plain C struct.
    let mut group: libc::group = unsafe { std::mem::zeroed() };
    // Large enough for the names of thousands of members.
    let mut text = vec![0; 1 << 20];
    let mut found = std::ptr::null_mut();
    let (to, len) = (text.as_mut_ptr(), text.len());
    // SAFETY: `name` ends with a zero byte; the function writes to `group`, `found`, and at most
    // `len` bytes to `text`, which are ours and outlive the call.
    let rc = unsafe { libc::getgrnam_r(name.as_ptr(), &mut group, to, len, &mut found) };
    match rc {
        0 => Ok((!found.is_null()).then_some(group.gr_gid)),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Returns how often this thread has gone to sleep.
pub(crate) fn voluntary_switches() -> i64 {
    // SAFETY: an all-zero rusage is a valid value of this plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes only to `usage`, which is ours.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nvcsw
}

/// Converts seconds since 1970 to local time: year, month, day, hour, minute, second. `None`: the
/// year is out of range.
pub fn local_time(seconds: i64) -> Option<[i32; 6]> {
    // SAFETY: an all-zero tm is a valid value of this plain C struct.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to our values, which outlive the call.
    let converted = unsafe { libc::localtime_r(&seconds, &mut tm) };
    let year = tm.tm_year.checked_add(1900)?;
    (!converted.is_null()).then_some([
        year,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec,
    ])
}

/// Lock of an image while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Several readers, no writer.
    Shared,
    /// One writer, and no other user.
    Exclusive,
    /// Not locked.
    None,
}

/// The lock bytes of QEMU's file-posix driver. A process holds read locks on the bytes of the
/// permissions that it uses, and of those that it denies to others.
const READING: i64 = 100;
const WRITING: i64 = 101;
const RESIZING: i64 = 103;
const NO_WRITING: i64 = 201;
const NO_RESIZING: i64 = 203;

/// Locks the file for this open file description (OFD locks, which the kernel releases with the
/// last descriptor, even if the process is killed).
///
/// A writer locks the whole file. A reader locks the bytes that QEMU's readers lock, so that it can
/// coexist with them and excludes QEMU's writers. `Ok(false)`: another process holds a conflicting
/// lock.
pub fn lock(fd: impl AsFd, lock: Lock) -> io::Result<bool> {
    let fd = fd.as_fd();
    match lock {
        Lock::Exclusive => return set_lock(fd, libc::F_WRLCK, 0, 0),
        Lock::None => return set_lock(fd, libc::F_UNLCK, 0, 0),
        Lock::Shared => {}
    }
    for byte in [READING, NO_WRITING, NO_RESIZING] {
        if !set_lock(fd, libc::F_RDLCK, byte, 1)? {
            set_lock(fd, libc::F_UNLCK, 0, 0)?;
            return Ok(false);
        }
    }
    // Check after locking: if two processes lock at the same time, at least one sees the other.
    if is_locked(fd, WRITING)? || is_locked(fd, RESIZING)? {
        set_lock(fd, libc::F_UNLCK, 0, 0)?;
        return Ok(false);
    }
    // Release the other bytes, if this process was a writer before.
    let between = NO_WRITING - READING - 1;
    for (start, len) in
        [(0, READING), (READING + 1, between), (NO_WRITING + 1, 1), (NO_RESIZING + 1, 0)]
    {
        set_lock(fd, libc::F_UNLCK, start, len)?;
    }
    Ok(true)
}

/// Sets a lock. A length of 0 means up to the end. `Ok(false)`: a conflicting lock exists.
pub(crate) fn set_lock(
    fd: BorrowedFd<'_>,
    kind: libc::c_int,
    start: i64,
    len: i64,
) -> io::Result<bool> {
    let flock = flock_of(kind, start, len);
    // SAFETY: F_OFD_SETLK reads the struct, which outlives the call.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &flock) };
    match (rc, io::Error::last_os_error()) {
        (0, _) => Ok(true),
        (_, e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        (_, e) => Err(e),
    }
}

/// Returns whether another open file description has any lock on this byte.
fn is_locked(fd: BorrowedFd<'_>, byte: i64) -> io::Result<bool> {
    let mut flock = flock_of(libc::F_WRLCK, byte, 1);
    // SAFETY: F_OFD_GETLK reads and writes the struct, which is ours and outlives the call.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut flock) };
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(libc::c_int::from(flock.l_type) != libc::F_UNLCK)
    }
}

fn flock_of(kind: libc::c_int, start: i64, len: i64) -> libc::flock {
    // SAFETY: an all-zero flock is a valid value of this plain C struct; OFD locks require pid 0.
    let mut flock: libc::flock = unsafe { std::mem::zeroed() };
    flock.l_type = kind as _;
    flock.l_whence = libc::SEEK_SET as _;
    (flock.l_start, flock.l_len) = (start, len);
    flock
}

/// Raises the soft limit of open descriptors to the hard limit.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(
        Resource::Nofile,
        Rlimit { current: limit.maximum, maximum: limit.maximum },
    )?;
    Ok(())
}

/// Returns the limit of open descriptors.
pub fn descriptor_limit() -> u64 {
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the number of open descriptors.
pub fn open_descriptors() -> io::Result<u64> {
    // From Linux 6.2 on, `st_size` of this folder is the number of open descriptors. It was 0
    // before.
    match rustix::fs::stat("/proc/self/fd")?.st_size {
        0 => Ok(std::fs::read_dir("/proc/self/fd")?.count() as u64),
        count => Ok(count as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::own_process;

    /// A temporary folder of a test, deleted at its end.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn join(&self, name: &str) -> std::path::PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn folder() -> Folder {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("blockyard-host-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    #[test]
    fn peer_returns_the_other_end_of_a_socket() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let process = std::process::id() as i32;
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(peer(&socket), Some(Peer { process: Some(process), user }));
        assert!(program_of(process).is_some_and(|name| !name.is_empty()));
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(peer(&reader), None, "a pipe is not a socket");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(peer(&listener), None, "the peers of TCP have addresses");
    }

    #[test]
    fn groups_have_numbers_and_peers_have_groups() {
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("no such group").unwrap(), None);
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut own: Vec<_> =
            rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        let mut groups = peer_groups(&socket);
        own.sort_unstable();
        groups.sort_unstable();
        assert_eq!(groups, own);
    }

    #[test]
    fn locks_conflict_between_open_file_descriptions() {
        // The child processes of other tests would hold the locks too, until their `exec`.
        own_process::run(locks_conflict);
    }

    fn locks_conflict() {
        let folder = folder();
        let path = folder.join("lock");
        let open = || {
            std::fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .unwrap()
        };
        let (a, b) = (open(), open());
        assert!(lock(&a, Lock::Shared).unwrap());
        assert!(lock(&b, Lock::Shared).unwrap());
        assert!(!lock(&b, Lock::Exclusive).unwrap());
        drop(a);
        assert!(lock(&b, Lock::Exclusive).unwrap());
        let c = open();
        assert!(!lock(&c, Lock::Shared).unwrap());
        let names: Vec<_> = holders(&c).iter().map(|h| (h.pid, h.leaving)).collect();
        assert_eq!(names, [(std::process::id(), false)]);
        drop(b);
        assert!(holders(&c).is_empty(), "open, but not locked");
    }

    #[test]
    fn local_time_has_minute_offsets_and_rejects_huge_years() {
        let [year, month, ..] = local_time(1_700_000_000).unwrap();
        assert_eq!((year, month), (2023, 11));
        // All time zones have the same second, because they differ by whole minutes.
        assert_eq!(local_time(1_700_000_000).unwrap()[5], 20);
        assert_eq!(local_time(i64::MAX), None);
    }

    #[test]
    fn geometry_of_a_file_has_valid_block_sizes() {
        let folder = folder();
        let path = folder.join("geometry");
        let file = std::fs::File::create(&path).unwrap();
        let g = geometry(&file).unwrap();
        assert!(g.logical_block.is_power_of_two() && g.physical_block >= g.logical_block, "{g:?}");
        assert_eq!(file_size(&file).unwrap(), 0);
    }
}
