//! Parcels: bytes with descriptors, from one server to the next over a Unix stream socket.
//!
//! ```text
//!   length of the bytes (4) | number of descriptors (4) | one byte for each group of descriptors,
//!   which carries the group (SCM_RIGHTS) | the bytes
//! ```
//! What must hold: no call waits longer than its deadline, and a parcel that is longer than the
//! limits is refused before memory is reserved for it.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Descriptors that one message carries. The kernel accepts 253.
const GROUP: usize = 128;
/// Shortest time that a socket can wait.
const SHORTEST: Duration = Duration::from_millis(1);
/// Longest parcel in bytes, and most descriptors of one.
const MOST_BYTES: usize = 64 << 20;
const MOST_FDS: usize = 1 << 16;

/// Bytes and descriptors that belong together.
#[derive(Debug, Default)]
pub struct Parcel {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Parcel {
    /// Returns a parcel with copies of the descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let fds = self.fds.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        Ok(Parcel { bytes: self.bytes.clone(), fds })
    }
}

/// Sends a parcel before `deadline`.
pub fn send(
    stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    if bytes.len() > MOST_BYTES || fds.len() > MOST_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the parcel is too large"));
    }
    let mut header = [0; 8];
    header[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    header[4..].copy_from_slice(&(fds.len() as u32).to_le_bytes());
    write_all(stream, &header, deadline)?;
    for group in fds.chunks(GROUP) {
        send_group(stream, group, deadline)?;
    }
    write_all(stream, bytes, deadline)
}

/// Receives a parcel before `deadline`. `None`: the peer has closed the connection.
pub fn receive(stream: &UnixStream, deadline: Instant) -> io::Result<Option<Parcel>> {
    let mut header = [0; 8];
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match (&*stream).read(&mut header[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            // SIGSTOP and SIGCONT interrupt it without any handler, because it has a timeout.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(late(e)),
        }
    }
    read_all(stream, &mut header[1..], deadline)?;
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize
    };
    let (len, count) = (word(0), word(4));
    if len > MOST_BYTES || count > MOST_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the parcel is too large"));
    }
    let mut fds = Vec::with_capacity(count);
    while fds.len() < count {
        let before = fds.len();
        receive_group(stream, &mut fds, deadline)?;
        if fds.len() == before || fds.len() > count {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "descriptors are missing: the process may have too few left (ulimit -n)",
            ));
        }
    }
    let mut bytes = vec![0; len];
    read_all(stream, &mut bytes, deadline)?;
    Ok(Some(Parcel { bytes, fds }))
}

/// Receives a parcel without descriptors. At `deadline` it calls `end`, so that the kernel refuses
/// further bytes, and reads what has arrived before. `None`: the peer has closed the connection.
pub fn receive_until(
    stream: &UnixStream,
    deadline: Instant,
    end: impl FnOnce() -> io::Result<()>,
) -> io::Result<Option<Vec<u8>>> {
    let (mut bytes, mut end) = (Vec::new(), Some(end));
    loop {
        if let Some(len) = bytes.first_chunk::<4>().map(|len| u32::from_le_bytes(*len) as usize) {
            if len > MOST_BYTES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the parcel is too large"));
            }
            if let Some(body) = bytes.get(8..8 + len) {
                return Ok(Some(body.to_vec()));
            }
        }
        let time = left(deadline);
        if time.is_err()
            && let Some(end) = end.take()
        {
            end()?;
        }
        // After the end no read waits.
        stream.set_read_timeout(Some(time.unwrap_or(SHORTEST)))?;
        let mut part = [0; 4096];
        match (&*stream).read(&mut part) {
            Ok(0) if end.is_none() => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) if bytes.is_empty() => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes.extend_from_slice(&part[..n]),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            // The end of the time, or a signal.
            Err(e) => match late(e) {
                e if e.kind() == io::ErrorKind::TimedOut => {}
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// Makes the number of `target` refer to the open file of `source`.
///
/// A library that keeps its socket for itself can so continue on another connection.
pub fn replace(target: &impl AsRawFd, source: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: `target` owns its descriptor, so that the number is open. It stays open, and its
    // owner closes it once, as before.
    let rc = unsafe { libc::dup3(source.as_raw_fd(), target.as_raw_fd(), libc::O_CLOEXEC) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The kernel reports the end of a socket's time as WouldBlock.
fn late(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

fn write_all(stream: &UnixStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match (&*stream).write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(late(e)),
        }
    }
    Ok(())
}

fn read_all(stream: &UnixStream, mut bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match (&*stream).read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes = &mut bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(late(e)),
        }
    }
    Ok(())
}

fn send_group(stream: &UnixStream, group: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GROUP))];
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(group));
        stream.set_write_timeout(Some(left(deadline)?))?;
        let piece = [IoSlice::new(&[0])];
        match rustix::net::sendmsg(stream.as_fd(), &piece, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(late(e.into())),
        }
    }
}

fn receive_group(stream: &UnixStream, fds: &mut Vec<OwnedFd>, deadline: Instant) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GROUP))];
    let mut byte = [0];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        stream.set_read_timeout(Some(left(deadline)?))?;
        let piece = &mut [IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(stream.as_fd(), piece, &mut control, flags) {
            Ok(message) if message.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(late(e.into())),
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        return Ok(());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::testing::waits;

    fn soon() -> Instant {
        Instant::now() + waits::LIMIT
    }

    #[test]
    fn a_parcel_arrives_with_all_descriptors_in_order() {
        let (one, two) = UnixStream::pair().unwrap();
        let files: Vec<_> = (0..300)
            .map(|n: u32| {
                let file = rustix::fs::memfd_create("n", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                rustix::io::pwrite(&file, &n.to_le_bytes(), 0).unwrap();
                file
            })
            .collect();
        let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| n as u8).collect();
        let sender = std::thread::spawn({
            let bytes = bytes.clone();
            move || {
                let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                send(&one, &bytes, &fds, soon()).unwrap();
                send(&one, b"next", &[], soon()).unwrap();
            }
        });
        let parcel = receive(&two, soon()).unwrap().unwrap();
        assert!(parcel.bytes == bytes && parcel.fds.len() == 300);
        for (n, fd) in parcel.fds.iter().enumerate() {
            let mut word = [0; 4];
            rustix::io::pread(fd, &mut word, 0).unwrap();
            assert_eq!(u32::from_le_bytes(word), n as u32);
        }
        assert_eq!(receive(&two, soon()).unwrap().unwrap().bytes, b"next");
        waits::join(sender, "all is sent");
        assert!(receive(&two, soon()).unwrap().is_none());
    }

    #[test]
    fn a_peer_that_sends_nothing_or_too_much_is_an_error() {
        let (one, two) = UnixStream::pair().unwrap();
        let late = receive(&two, Instant::now() + Duration::from_millis(5)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        (&one).write_all(&[0xff; 8]).unwrap();
        assert_eq!(receive(&two, soon()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn signals_do_not_end_a_wait() {
        static HANDLED: AtomicU32 = AtomicU32::new(0);
        extern "C" fn count(_: libc::c_int) {
            HANDLED.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: an all-zero sigaction is valid: no SA_RESTART, so that calls are interrupted.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = count as extern "C" fn(_) as usize;
        // SAFETY: the handler only counts, and no other test of this program uses the signal.
        assert_eq!(unsafe { libc::sigaction(libc::SIGWINCH, &action, std::ptr::null_mut()) }, 0);
        let (one, two) = UnixStream::pair().unwrap();
        let receiver = std::thread::spawn(move || receive(&two, soon()).unwrap().unwrap().bytes);
        for sent in 1..=100 {
            // SAFETY: the thread is joined below, so that its handle is valid.
            unsafe { libc::pthread_kill(receiver.as_pthread_t(), libc::SIGWINCH) };
            waits::until("a signal is handled", || HANDLED.load(Ordering::SeqCst) >= sent);
        }
        send(&one, b"whole", &[], soon()).unwrap();
        assert_eq!(waits::join(receiver, "a parcel arrives"), b"whole");
    }

    fn header(len: usize, count: usize) -> [u8; 8] {
        let words = [len as u32, count as u32].map(u32::to_le_bytes);
        words.concat().try_into().unwrap()
    }

    #[test]
    fn each_limit_is_checked_by_itself() {
        for (len, count) in [(MOST_BYTES + 1, 0), (0, MOST_FDS + 1)] {
            let (one, two) = UnixStream::pair().unwrap();
            (&one).write_all(&header(len, count)).unwrap();
            drop(one);
            let error = receive(&two, soon()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{len} bytes, {count}: {error}");
        }
        let (one, two) = UnixStream::pair().unwrap();
        drop(two);
        let error = send(&one, &vec![0; MOST_BYTES + 1], &[], soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let fds = vec![one.as_fd(); MOST_FDS + 1];
        let error = send(&one, &[], &fds, soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_parcel_with_the_wrong_number_of_descriptors_is_an_error() {
        // The bytes after the group are enough for the parcel that the header announces.
        for (announced, sent) in [(3, 2), (2, 3), (1, 0)] {
            let (one, two) = UnixStream::pair().unwrap();
            (&one).write_all(&header(2, announced)).unwrap();
            match vec![one.as_fd(); sent].as_slice() {
                [] => (&one).write_all(&[0]).unwrap(),
                group => send_group(&one, group, soon()).unwrap(),
            }
            (&one).write_all(&[0; 5]).unwrap();
            drop(one);
            let error = receive(&two, soon()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{sent} of {announced}: {error}");
        }
    }

    #[test]
    fn a_parcel_that_ends_early_is_an_error() {
        for bytes in [&header(2, 1)[..], &header(2, 1)[..5], &[2, 0, 0, 0, 0, 0, 0, 0, 7]] {
            let (one, two) = UnixStream::pair().unwrap();
            (&one).write_all(bytes).unwrap();
            drop(one);
            let error = receive(&two, soon()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{bytes:?}");
        }
        // The peer ends without having read what was sent to it: a reset, and no error.
        let (one, two) = UnixStream::pair().unwrap();
        (&two).write_all(&[1]).unwrap();
        drop(one);
        assert!(receive(&two, soon()).unwrap().is_none());
    }

    #[test]
    fn a_replaced_descriptor_refers_to_the_other_file() {
        let (one, two) = waits::peers();
        let (three, four) = waits::peers();
        replace(&one, three.as_fd()).unwrap();
        drop(three);
        (&one).write_all(b"x").unwrap();
        let mut byte = [0];
        (&four).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        assert_eq!((&two).read(&mut byte).unwrap(), 0);
    }
}
