//! What the host is asked beside reads and writes: locks, geometry, block-device calls.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit};

use crate::segments::Segments;

/// Entries of an iovec that one call takes (IOV_MAX).
const IOV_MOST: usize = 1024;

/// The limits and the shape of the storage under an image, in bytes; 0 is "not told".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub logical_block: u32,
    pub physical_block: u32,
    /// The least I/O that costs no read-modify-write below (a RAID chunk).
    pub minimum_io: u32,
    /// The I/O that keeps all of the device busy (a RAID stripe).
    pub optimal_io: u32,
    /// Where the first physical block begins in the image.
    pub alignment_offset: u32,
    /// What O_DIRECT demands of addresses and of offsets and lengths; 0 when it is not supported.
    pub direct_memory: u32,
    pub direct_offset: u32,
    pub rotational: bool,
}

/// That of storage of which nothing is known.
impl Default for Geometry {
    fn default() -> Self {
        Geometry {
            logical_block: 512,
            physical_block: 4096,
            minimum_io: 4096,
            optimal_io: 0,
            alignment_offset: 0,
            direct_memory: 1,
            direct_offset: 1,
            rotational: false,
        }
    }
}

/// The size in bytes of a regular file or a block device.
pub fn file_size(fd: impl AsFd) -> io::Result<u64> {
    let stat = rustix::fs::fstat(fd.as_fd())?;
    match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
        rustix::fs::FileType::RegularFile => Ok(stat.st_size as u64),
        // Seeking to the end is the way that needs no ioctl; the position is nobody's business
        // here.
        rustix::fs::FileType::BlockDevice => {
            Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?)
        }
        kind => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("it is a {kind:?}, not a file or block device"),
        )),
    }
}

/// Reads the geometry of the device that holds `fd` (or that it is), from sysfs and statx.
pub fn geometry(fd: impl AsFd) -> io::Result<Geometry> {
    let stat = rustix::fs::fstat(fd.as_fd())?;
    let is_device =
        rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice;
    let dev = if is_device { stat.st_rdev } else { stat.st_dev };
    let folder = device_folder(dev);
    let folder = folder.as_deref();
    let read = |name: &str| folder.and_then(|f| read_number(&f.join(name))).unwrap_or(0);
    let logical = read("queue/logical_block_size").max(512);
    let (direct_memory, direct_offset) = direct_alignment(fd.as_fd()).unwrap_or((logical, logical));
    let mut geometry = Geometry {
        logical_block: logical,
        physical_block: read("queue/physical_block_size").max(logical),
        minimum_io: read("queue/minimum_io_size"),
        optimal_io: read("queue/optimal_io_size"),
        alignment_offset: folder
            .and_then(|f| read_number(&f.join("alignment_offset")))
            .unwrap_or(0),
        direct_memory,
        direct_offset,
        rotational: read("queue/rotational") == 1,
    };
    if !is_device {
        // A file's blocks are where its file system put them: only sizes carry over, not positions.
        geometry.alignment_offset = 0;
        let block = u32::try_from(stat.st_blksize).unwrap_or(4096).min(1 << 16);
        geometry.physical_block = geometry.physical_block.max(block.next_power_of_two().min(4096));
    }
    Ok(geometry)
}

/// What a block device takes as one request; of more the kernel makes several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    pub bytes: u64,
    /// Pieces of memory, and bytes of each.
    pub segments: u16,
    pub segment_bytes: u32,
}

/// None: it is no block device, or the kernel does not tell.
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

/// The folder in sysfs of a block device; a partition's queue is its parent's. None: no block
/// device (tmpfs, NFS).
fn device_folder(dev: u64) -> Option<PathBuf> {
    let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let folder = std::fs::canonicalize(link).ok()?;
    if folder.join("queue").exists() {
        Some(folder)
    } else {
        folder.parent().map(Path::to_path_buf)
    }
}

/// The device that a file lies on, or that it is, as "major:minor", and whether it turns. Of a
/// partition it is the whole disk, for all of them share one queue. A file system without a block
/// device (tmpfs, NFS, Btrfs) is one by itself.
pub fn backing_device(fd: impl AsFd) -> io::Result<(String, bool)> {
    let stat = rustix::fs::fstat(fd.as_fd())?;
    let is_device =
        rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice;
    let dev = if is_device { stat.st_rdev } else { stat.st_dev };
    let own = format!("{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let Some(folder) = device_folder(dev) else { return Ok((own, false)) };
    let whole = std::fs::read_to_string(folder.join("dev"))
        .map_or(own, |numbers| numbers.trim().to_string());
    // A virtual disk says that it turns when nobody has told the guest otherwise.
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let is_virtual = name.starts_with("vd") || name.starts_with("xvd");
    Ok((whole, !is_virtual && read_number(&folder.join("queue/rotational")) == Some(1)))
}

fn read_number(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path)
        .ok()?
        .trim()
        .parse::<i64>()
        .ok()
        .and_then(|n| u32::try_from(n).ok())
}

/// (memory, offset) alignment that O_DIRECT demands, where the kernel tells (6.1); (0, 0): not
/// supported.
fn direct_alignment(fd: impl AsFd) -> Option<(u32, u32)> {
    // SAFETY: an all-zero statx is a valid value of a plain C struct.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let raw = fd.as_fd().as_raw_fd();
    // SAFETY: an empty path with AT_EMPTY_PATH asks about `raw`; `stat` is ours to be written.
    let rc = unsafe {
        libc::statx(raw, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &mut stat)
    };
    (rc == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// Discards a range of a block device (BLKDISCARD): blocks until done.
pub fn block_discard(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64 from the pointer, which outlives the call.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), BLKDISCARD as _, range.as_ptr()) };
    match (rc, io::Error::last_os_error()) {
        (0, _) => Ok(()),
        (_, e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, e))
        }
        (_, e) => Err(e),
    }
}

/// Writes `segments` at `offset`, on this thread and at once; how many bytes it was (pwritev2's
/// answer).
pub(crate) fn write_at(
    fd: impl AsFd,
    segments: &Segments,
    offset: u64,
    flags: libc::c_int,
) -> io::Result<usize> {
    let iov = segments.iovecs();
    let count = iov.len().min(IOV_MOST) as libc::c_int;
    // SAFETY: the entries point into memory that `segments` keeps alive, which the call only reads.
    let n = unsafe {
        libc::pwritev2(fd.as_fd().as_raw_fd(), iov.as_ptr(), count, offset as libc::off_t, flags)
    };
    if n >= 0 { Ok(n as usize) } else { Err(io::Error::last_os_error()) }
}

/// Tells the kernel that this thread, and those it starts, write pages back: then memory that they
/// ask for never waits for pages that are to be written to them.
pub fn set_io_flusher() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: plain numbers.
    let rc = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a block device could be claimed just now; `ResourceBusy`: it is mounted, or has another
/// owner.
pub fn claim(device: &Path) -> io::Result<()> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(device, flags, rustix::fs::Mode::empty()).map(drop)?)
}

/// The process at the other end of a Unix socket; None: it is not known here (another PID
/// namespace).
pub fn peer_process(socket: impl AsFd) -> Option<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let (fd, to) = (socket.as_fd().as_raw_fd(), (&raw mut peer).cast());
    // SAFETY: the kernel writes at most `len` bytes, the size of `peer`, which is ours. (Plain
    // integers: unlike rustix's, this process number may be 0.)
    let rc = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len) };
    (rc == 0 && peer.pid > 0).then_some(peer.pid)
}

/// How often this thread has gone to sleep.
pub(crate) fn voluntary_switches() -> i64 {
    // SAFETY: an all-zero rusage is a valid value of a plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is ours to be written.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nvcsw
}

/// A time since 1970 as the clock on the wall shows it: year, month, day, hour, minute, second.
/// None: there is no such year.
pub fn local_time(seconds: i64) -> Option<[i32; 6]> {
    // SAFETY: an all-zero tm is a valid value of a plain C struct.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both point to values of ours, which outlive the call.
    let told = unsafe { libc::localtime_r(&seconds, &mut tm) };
    let year = tm.tm_year.checked_add(1900)?;
    (!told.is_null()).then_some([year, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec])
}

/// How an image is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Many readers, no writer.
    Shared,
    /// One writer, nobody else.
    Exclusive,
    /// Not any more.
    None,
}

/// The bytes by which QEMU's processes tell one another what they do with an image: each has read
/// locks on those of what it does, and on those of what it bears nobody else to do.
const READING: i64 = 100;
const WRITING: i64 = 101;
const RESIZING: i64 = 103;
const NO_WRITING: i64 = 201;
const NO_RESIZING: i64 = 203;

/// Locks the file for this open file description (OFD locks: they fall with the last descriptor,
/// also when the process is killed): to write, all of it; to read, the bytes by which QEMU knows a
/// reader, so that its readers may be there too and its writers may not. `Ok(false)`: somebody else
/// has it locked.
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
    // Looked at afterwards: of two who come at once, one sees the other.
    if is_locked(fd, WRITING)? || is_locked(fd, RESIZING)? {
        set_lock(fd, libc::F_UNLCK, 0, 0)?;
        return Ok(false);
    }
    // What a writer had besides, who is a reader from now on.
    let between = NO_WRITING - READING - 1;
    for (start, len) in
        [(0, READING), (READING + 1, between), (NO_WRITING + 1, 1), (NO_RESIZING + 1, 0)]
    {
        set_lock(fd, libc::F_UNLCK, start, len)?;
    }
    Ok(true)
}

/// `Ok(false)`: another lock is in the way. A length of 0 is all that follows.
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

/// Whether somebody else has any lock on this byte.
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
    // SAFETY: an all-zero flock (pid 0 as OFD locks demand) is a valid value of a plain C struct.
    let mut flock: libc::flock = unsafe { std::mem::zeroed() };
    flock.l_type = kind as _;
    flock.l_whence = libc::SEEK_SET as _;
    (flock.l_start, flock.l_len) = (start, len);
    flock
}

/// Raises the limit of open descriptors to the most that the process may have.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(
        Resource::Nofile,
        Rlimit { current: limit.maximum, maximum: limit.maximum },
    )?;
    Ok(())
}

/// The number of descriptors that the process may have.
pub fn descriptor_limit() -> u64 {
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The number of descriptors that the process has.
pub fn open_descriptors() -> io::Result<u64> {
    // From Linux 6.2 on the folder's size is the number.
    match rustix::fs::stat("/proc/self/fd")?.st_size {
        0 => Ok(std::fs::read_dir("/proc/self/fd")?.count() as u64),
        count => Ok(count as u64),
    }
}

/// A process that has a file locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub name: String,
    /// It is on its way out (killed): its locks fall by themselves.
    pub leaving: bool,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (pid {})", self.name, self.pid)
    }
}

/// Who has the file locked, this process included, as far as /proc lets us see: for the message to
/// a person.
pub fn holders(fd: impl AsFd) -> Vec<Holder> {
    let Ok(ours) = rustix::fs::fstat(fd.as_fd()) else { return Vec::new() };
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let locks = |fd: &std::fs::DirEntry, pid: u32| {
        use std::os::unix::fs::MetadataExt;
        let same = std::fs::metadata(fd.path())
            .is_ok_and(|m| m.dev() == ours.st_dev && m.ino() == ours.st_ino);
        // The kernel tells there which locks came through this very descriptor.
        let info = || {
            std::fs::read_to_string(format!(
                "/proc/{pid}/fdinfo/{}",
                fd.file_name().to_string_lossy()
            ))
        };
        // (flock(2) is another matter, and in nobody's way.)
        same && info().is_ok_and(|text| text.contains("OFDLCK") || text.contains("POSIX"))
    };
    let holds = |pid: &u32| {
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .is_ok_and(|fds| fds.flatten().any(|fd| locks(&fd, *pid)))
    };
    pids.filter(holds).map(holder).collect()
}

fn holder(pid: u32) -> Holder {
    const PF_EXITING: u32 = 4;
    let read =
        |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
    // proc(5): the name in the second field may hold anything, parentheses too; the flags are the
    // ninth field.
    let stat = read("stat");
    let flags = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().nth(6)?.parse::<u32>().ok());
    Holder {
        pid,
        name: read("comm").trim().into(),
        leaving: flags.is_none_or(|f| f & PF_EXITING != 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of a test's own, gone with it.
    struct Folder(PathBuf);

    impl Folder {
        fn join(&self, name: &str) -> PathBuf {
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
    fn a_socket_names_the_process_at_its_other_end() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(peer_process(&socket), Some(std::process::id() as i32));
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(peer_process(&reader), None, "no socket");
    }

    #[test]
    fn locks_are_between_open_file_descriptions() {
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
    fn times_of_day() {
        let [year, month, ..] = local_time(1_700_000_000).unwrap();
        assert_eq!((year, month), (2023, 11));
        // Time zones differ by whole minutes.
        assert_eq!(local_time(1_700_000_000).unwrap()[5], 20);
        assert_eq!(local_time(i64::MAX), None);
    }

    #[test]
    fn geometry_is_sane_for_a_file() {
        let folder = folder();
        let path = folder.join("geometry");
        let file = std::fs::File::create(&path).unwrap();
        let g = geometry(&file).unwrap();
        assert!(g.logical_block.is_power_of_two() && g.physical_block >= g.logical_block, "{g:?}");
        assert_eq!(file_size(&file).unwrap(), 0);
    }
}
