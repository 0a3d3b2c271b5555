//! A running program moves to another server: the next one at a hand-over, or back to this one.
//!
//! ```text
//!   asked NUMBER        the number of the next question
//!   unread BYTES        how many bytes of the program's next line follow at the end
//!   blockyard-map 1 ... ready     what the program said at its start
//! ```
//!
//! In: a program that owes no answer. Out: a parcel with its connection and its process, and from
//! the parcel a program that is ready. The program notices nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use blockyard_ring::parcel::Parcel;

use super::protocol::{GREETING, Hello};
use super::start::{Process, Started};
use crate::target::{Access, Shape};

/// What a program said at its start.
#[derive(Clone)]
pub(super) struct Introduction {
    pub shape: Shape,
    pub data: Vec<(PathBuf, Access)>,
    pub discards: bool,
}

/// Where the conversation with a program is.
#[derive(Default)]
pub(super) struct Position {
    /// Number of the next question.
    pub next: u64,
    /// The beginning of a line that is not whole.
    pub unread: Vec<u8>,
}

pub(super) fn pack(
    introduction: &Introduction,
    position: &Position,
    stream: OwnedFd,
    process: OwnedFd,
) -> Parcel {
    let Introduction { shape, data, discards } = introduction;
    let Position { next, unread } = position;
    let mut bytes = format!(
        "asked {next}\nunread {}\n{GREETING}\nsize {}\ngranule {}\n",
        unread.len(),
        shape.size,
        shape.granule
    )
    .into_bytes();
    for (path, access) in data {
        bytes.extend_from_slice(if *access == Access::Write { b"data w " } else { b"data r " });
        bytes.extend_from_slice(path.as_os_str().as_encoded_bytes());
        bytes.push(b'\n');
    }
    bytes.extend_from_slice(if *discards { b"discards\nready\n" } else { b"ready\n" });
    bytes.extend_from_slice(unread);
    Parcel { bytes, fds: vec![stream, process] }
}

pub(super) fn unpack(parcel: Parcel) -> io::Result<Started> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
    let Parcel { bytes, fds } = parcel;
    let mut rest = &bytes[..];
    let mut line = || {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let (line, after) = rest.split_at(end);
        rest = &after[1..];
        std::str::from_utf8(line).ok()
    };
    let mut number = |word: &str| line()?.strip_prefix(word)?.parse::<u64>().ok();
    let (next, unread) = (number("asked "), number("unread "));
    let (next, unread) = next.zip(unread).ok_or_else(|| wrong("no position of a program"))?;
    let (mut hello, mut shape) = (Hello::default(), None);
    while shape.is_none() {
        let said = line().ok_or_else(|| wrong("the introduction of a program is not whole"))?;
        shape = hello.line(said).map_err(|what| wrong(&what))?;
    }
    let shape = shape.ok_or_else(|| wrong("no shape"))?;
    if rest.len() as u64 != unread {
        return Err(wrong("the unread bytes of a program are not whole"));
    }
    let position = Position { next, unread: rest.to_vec() };
    let fds: Result<[OwnedFd; 2], _> = fds.try_into();
    let [stream, process] = fds.map_err(|_| wrong("a program has two descriptors"))?;
    rustix::net::sockopt::socket_type(&stream)?;
    let Hello { data, discards, .. } = hello;
    Ok(Started {
        introduction: Introduction { shape, data, discards },
        position,
        stream: UnixStream::from(stream),
        process: Process::of_another(process),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptors() -> [OwnedFd; 2] {
        let (one, other) = UnixStream::pair().unwrap();
        [one.into(), other.into()]
    }

    fn introduction() -> Introduction {
        let data = vec![("/a b".into(), Access::Read), ("/c".into(), Access::Write)];
        Introduction { shape: Shape { size: 8192, granule: 4096 }, data, discards: true }
    }

    #[test]
    fn an_unpacked_program_is_the_packed_one() {
        let position = Position { next: 7, unread: b"inval".to_vec() };
        let [stream, process] = descriptors();
        let started = unpack(pack(&introduction(), &position, stream, process)).unwrap();
        let Introduction { shape, data, discards } = started.introduction;
        let wanted = introduction();
        assert_eq!((shape, data, discards), (wanted.shape, wanted.data, wanted.discards));
        assert_eq!((started.position.next, &started.position.unread[..]), (7, &b"inval"[..]));
    }

    #[test]
    fn a_truncated_parcel_is_refused() {
        let position = Position { next: 7, unread: b"inval".to_vec() };
        let [stream, process] = descriptors();
        let whole = pack(&introduction(), &position, stream, process).bytes;
        for len in 0..whole.len() {
            let parcel = Parcel { bytes: whole[..len].to_vec(), fds: descriptors().into() };
            assert!(unpack(parcel).is_err(), "{len} bytes");
        }
        let [stream, _] = descriptors();
        assert!(unpack(Parcel { bytes: whole, fds: vec![stream] }).is_err());
    }
}
