//! A running program moves to another server: the next one at a hand-over, or back to this one.
//!
//! ```text
//!   image BYTES                   length of the image's name
//!   asked NUMBER                  the number of the next question
//!   owed NUMBER NUMBER...         questions of failed requests, which it may still answer
//!   unread BYTES                  length of a line's beginning, which it has sent
//!   unsent BYTES                  length of lines that wait for it to read
//!   blockyard-map 1 ... ready     what the program said at its start
//!   the bytes of these lengths
//! ```
//!
//! In: a program that no request waits for. Out: a parcel with its connection and its process, and
//! from the parcel a program that is ready. The program notices nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use blockyard_ring::parcel::Parcel;

use super::process::{Introduction, Position, Process, Started};
use super::protocol::{GREETING, Hello};
use crate::targets::{Access, Shape};

pub(super) fn pack(
    image: &str,
    introduction: &Introduction,
    position: &Position,
    fds: [OwnedFd; 2],
) -> Parcel {
    let Introduction { shape, data, discards } = introduction;
    let Position { next, owed, unread, unsent } = position;
    let (image_len, unread_len, unsent_len) = (image.len(), unread.len(), unsent.len());
    let owed: String = owed.iter().map(|number| format!(" {number}")).collect();
    let Shape { size, granule } = shape;
    let mut bytes = format!(
        "image {image_len}\nasked {next}\nowed{owed}\nunread {unread_len}\nunsent {unsent_len}\n\
         {GREETING}\nsize {size}\ngranule {granule}\n"
    )
    .into_bytes();
    for (path, access) in data {
        bytes.extend_from_slice(if *access == Access::Write { b"data w " } else { b"data r " });
        bytes.extend_from_slice(path.as_os_str().as_encoded_bytes());
        bytes.push(b'\n');
    }
    bytes.extend_from_slice(if *discards { b"discards\nready\n" } else { b"ready\n" });
    bytes.extend_from_slice(image.as_bytes());
    bytes.extend_from_slice(unread);
    bytes.extend_from_slice(unsent);
    Parcel { bytes, fds: fds.into() }
}

/// Returns the image's name and the program.
pub(super) fn unpack(parcel: Parcel) -> io::Result<(String, Started)> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
    let Parcel { bytes, fds } = parcel;
    let mut rest = &bytes[..];
    let mut line = || {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let (line, after) = rest.split_at(end);
        rest = &after[1..];
        std::str::from_utf8(line).ok()
    };
    let mut position = || {
        let image = line()?.strip_prefix("image ")?.parse::<usize>().ok()?;
        let next = line()?.strip_prefix("asked ")?.parse::<u64>().ok()?;
        let owed = line()?.strip_prefix("owed")?.split_whitespace();
        let owed = owed.map(|word| word.parse::<u64>().ok()).collect::<Option<Vec<_>>>()?;
        let mut length = |word: &str| line()?.strip_prefix(word)?.parse::<usize>().ok();
        Some((next, owed, [image, length("unread ")?, length("unsent ")?]))
    };
    let (next, owed, lengths) = position().ok_or_else(|| wrong("no position of a program"))?;
    let (mut hello, mut shape) = (Hello::default(), None);
    while shape.is_none() {
        let said = line().ok_or_else(|| wrong("the introduction of a program is not whole"))?;
        shape = hello.line(said).map_err(|what| wrong(&what.to_string()))?;
    }
    let shape = shape.ok_or_else(|| wrong("no shape"))?;
    let mut part = |len| {
        let (part, after) = rest.split_at_checked(len)?;
        rest = after;
        Some(part.to_vec())
    };
    let [Some(image), Some(unread), Some(unsent)] = lengths.map(&mut part) else {
        return Err(wrong("the bytes from and for a program are not whole"));
    };
    let image = String::from_utf8(image).map_err(|_| wrong("the name of a program is no text"))?;
    if !rest.is_empty() {
        return Err(wrong("bytes follow those from and for a program"));
    }
    let position = Position { next, owed, unread, unsent };
    let fds: Result<[OwnedFd; 2], _> = fds.try_into();
    let [stream, process] = fds.map_err(|_| wrong("a program has two descriptors"))?;
    rustix::net::sockopt::socket_type(&stream)?;
    let Hello { data, discards, .. } = hello;
    let started = Started {
        introduction: Introduction { shape, data, discards },
        position,
        stream: UnixStream::from(stream),
        process: Process::of_another(process),
    };
    Ok((image, started))
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

    fn position() -> Position {
        let (owed, unread) = (vec![3, 5], b"inval".to_vec());
        Position { next: 7, owed, unread, unsent: b"512\nlocate 6 r 0 512\n".to_vec() }
    }

    #[test]
    fn an_unpacked_program_is_the_packed_one() {
        let packed = pack("exec:/p", &introduction(), &position(), descriptors());
        let (image, started) = unpack(packed).unwrap();
        assert_eq!(image, "exec:/p");
        let Introduction { shape, data, discards } = started.introduction;
        let wanted = introduction();
        assert_eq!((shape, data, discards), (wanted.shape, wanted.data, wanted.discards));
        assert_eq!(started.position, position());
        assert!(!started.process.is_owned(), "another server has started it");
    }

    #[test]
    fn a_truncated_parcel_is_refused() {
        let whole = pack("exec:/p", &introduction(), &position(), descriptors()).bytes;
        for len in 0..whole.len() {
            let parcel = Parcel { bytes: whole[..len].to_vec(), fds: descriptors().into() };
            assert!(unpack(parcel).is_err(), "{len} bytes");
        }
        let [stream, _] = descriptors();
        assert!(unpack(Parcel { bytes: whole, fds: vec![stream] }).is_err());
    }
}
