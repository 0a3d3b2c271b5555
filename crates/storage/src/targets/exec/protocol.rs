//! The lines that a program and Blockyard send.
//!
//! Numbers are decimal, offsets and lengths in bytes. Words are separated by one space, items of a
//! list by a comma and a space. docs/own-target.md describes the protocol for authors.

use std::fmt::Write;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::PathBuf;

use crate::targets::map::{Discard, Extent, Fill, Place, Question};
use crate::targets::{Access, Shape};

/// Version of the protocol.
pub(super) const GREETING: &str = "blockyard-map 1";
/// Longest line of a program in bytes.
pub(super) const MOST_LINE: usize = 1 << 20;
/// Most data files.
const MOST_FILES: usize = 64;

/// Why a line of a program is refused. Each variant has the beginning of what the program sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LineError {
    #[error("it sent \"{0}\" at its start, not \"{GREETING}\"")]
    Greeting(String),
    #[error("it sent \"{0}\" at its start")]
    AtStart(String),
    #[error("it was ready and had sent no {0}")]
    Missing(&'static str),
    #[error("it sent \"{0}\"")]
    Unknown(String),
    #[error("it answered what nobody asked")]
    Unasked,
    #[error("it sent an invalidation while {0} others wait")]
    Invalidations(u32),
    #[error(
        "it sent the size {0}, which is no size of a disk (a multiple of its granule, 1 granule to \
         2^62 bytes)"
    )]
    Size(u64),
}

/// The reason that a program gives for an answer that is an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(super) struct Reason {
    /// How the request fails: without space, or in another way.
    pub(super) kind: ErrorKind,
    text: String,
}

/// What a program says at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hello {
    size: Option<u64>,
    granule: Option<u64>,
    pub(super) data: Vec<(PathBuf, Access)>,
    /// Whether the program answers discards.
    pub(super) discards: bool,
    greeted: bool,
}

impl Hello {
    /// Takes in a line. Returns the shape after the last one.
    pub(super) fn line(&mut self, line: &str) -> Result<Option<Shape>, LineError> {
        let unknown = || LineError::AtStart(shortened(line));
        if !std::mem::replace(&mut self.greeted, true) {
            return match line {
                GREETING => Ok(None),
                _ => Err(LineError::Greeting(shortened(line))),
            };
        }
        match line.split_once(' ') {
            Some(("size", text)) => self.size = Some(text.parse().map_err(|_| unknown())?),
            Some(("granule", text)) => self.granule = Some(text.parse().map_err(|_| unknown())?),
            Some(("data", text)) if self.data.len() < MOST_FILES => {
                let (access, path) = match text.split_once(' ') {
                    Some(("r", path)) => (Access::Read, path),
                    Some(("w", path)) => (Access::Write, path),
                    _ => return Err(unknown()),
                };
                self.data.push((path.into(), access));
            }
            None if line == "discards" => self.discards = true,
            None if line == "ready" => {
                let size = self.size.ok_or(LineError::Missing("size"))?;
                let granule = self.granule.ok_or(LineError::Missing("granule"))?;
                return Ok(Some(Shape { size, granule }));
            }
            _ => return Err(unknown()),
        }
        Ok(None)
    }
}

/// A line of a running program.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// The answer to the call with this number.
    Answer(u64, Result<Vec<Extent>, Reason>),
    Invalidate(Range<u64>),
    /// The disk has this many bytes now.
    Size(u64),
}

/// Returns the line that asks a question.
pub(super) fn locate(number: u64, question: &Question) -> String {
    let Question { offset, len, write } = question;
    format!("locate {number} {} {offset} {len}\n", if *write { "w" } else { "r" })
}

/// Returns the line that asks to make parts durable.
pub(super) fn flush(number: u64, moved: &[Range<u64>]) -> String {
    let mut line = format!("flush {number}");
    for (at, range) in moved.iter().enumerate() {
        let comma = if at > 0 { "," } else { "" };
        let _ = write!(line, "{comma} {} {}", range.start, range.end - range.start);
    }
    line.push('\n');
    line
}

/// Returns the line that asks what becomes of a range that a guest no longer needs.
pub(super) fn discard(number: u64, asked: &Discard) -> String {
    let Discard { offset, len, zero } = asked;
    format!("{} {number} {offset} {len}\n", if *zero { "zero" } else { "discard" })
}

/// Returns the line that says that an invalidation is done.
pub(super) fn invalidated(range: &Range<u64>) -> String {
    format!("invalidated {} {}\n", range.start, range.end - range.start)
}

/// Parses a line of a running program.
pub(super) fn parse(line: &str) -> Result<Said, LineError> {
    let unknown = || LineError::Unknown(shortened(line));
    let mut words = line.splitn(3, ' ');
    let (word, number) = (words.next().unwrap_or_default(), words.next());
    let number: u64 = number.and_then(|text| text.parse().ok()).ok_or_else(unknown)?;
    let rest = words.next();
    match (word, rest) {
        ("ok", None) => Ok(Said::Answer(number, Ok(Vec::new()))),
        ("ok", Some(list)) => {
            let extents: Option<Vec<Extent>> = list.split(", ").map(extent).collect();
            Ok(Said::Answer(number, Ok(extents.ok_or_else(unknown)?)))
        }
        ("error" | "full", why) => {
            let (kind, else_why) = match word {
                "full" => (ErrorKind::StorageFull, "no space left"),
                _ => (ErrorKind::Other, "no reason"),
            };
            Ok(Said::Answer(number, Err(Reason { kind, text: shortened(why.unwrap_or(else_why)) })))
        }
        ("size", None) => Ok(Said::Size(number)),
        ("invalidate", Some(len)) => {
            let len: u64 = len.parse().map_err(|_| unknown())?;
            let end = number.checked_add(len).ok_or_else(unknown)?;
            Ok(Said::Invalidate(number..end))
        }
        _ => Err(unknown()),
    }
}

/// Parses `LEN zero`, `LEN at FILE OFFSET`, `LEN new FILE OFFSET zero` or `LEN new FILE OFFSET from
/// FILE OFFSET`.
fn extent(text: &str) -> Option<Extent> {
    let mut words = text.split(' ');
    let len = words.next()?.parse().ok()?;
    let mut place = || Some((words.next()?, words.next(), words.next()));
    let numbers = |file: Option<&str>, offset: Option<&str>| {
        Some((file?.parse::<usize>().ok()?, offset?.parse::<u64>().ok()?))
    };
    let place = match place()? {
        ("zero", None, None) => Place::Zero,
        ("at", file, offset) => {
            let (file, offset) = numbers(file, offset)?;
            Place::At { file, offset }
        }
        ("new", file, offset) => {
            let (file, offset) = numbers(file, offset)?;
            let fill = match (words.next()?, words.next(), words.next()) {
                ("zero", None, None) => Fill::Zero,
                ("from", file, offset) => {
                    let (file, offset) = numbers(file, offset)?;
                    Fill::From { file, offset }
                }
                _ => return None,
            };
            Place::New { file, offset, fill }
        }
        _ => return None,
    };
    words.next().is_none().then_some(Extent { len, place })
}

/// Returns the beginning of what a program sent, for messages.
fn shortened(text: &str) -> String {
    text.escape_debug().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed_and_written() {
        let question = Question { offset: 65536, len: 131072, write: true };
        assert_eq!(locate(3, &question), "locate 3 w 65536 131072\n");
        assert_eq!(flush(4, &[0..512, 4096..8192]), "flush 4 0 512, 4096 4096\n");
        let asked = |zero| discard(5, &Discard { offset: 65536, len: 512, zero });
        assert_eq!(
            (asked(false), asked(true)),
            ("discard 5 65536 512\n".into(), "zero 5 65536 512\n".into())
        );
        let answer = parse("ok 3 4096 at 1 512, 4096 zero, 512 new 1 0 zero, 512 new 1 0 from 0 7");
        let at = Place::At { file: 1, offset: 512 };
        let new = |fill| Place::New { file: 1, offset: 0, fill };
        let extents = [
            (4096, at),
            (4096, Place::Zero),
            (512, new(Fill::Zero)),
            (512, new(Fill::From { file: 0, offset: 7 })),
        ];
        let extents = extents.map(|(len, place)| Extent { len, place });
        assert_eq!(answer, Ok(Said::Answer(3, Ok(extents.into()))));
        assert_eq!(parse("ok 9"), Ok(Said::Answer(9, Ok(Vec::new()))));
        for (line, kind, text) in [
            ("error 9 bad disk", ErrorKind::Other, "bad disk"),
            ("error 9", ErrorKind::Other, "no reason"),
            ("full 9", ErrorKind::StorageFull, "no space left"),
            ("full 9 the store", ErrorKind::StorageFull, "the store"),
        ] {
            let reason = Reason { kind, text: text.into() };
            assert_eq!(parse(line), Ok(Said::Answer(9, Err(reason))));
        }
        assert_eq!(parse("invalidate 512 512"), Ok(Said::Invalidate(512..1024)));
        assert_eq!(parse("size 4096"), Ok(Said::Size(4096)));
    }

    #[test]
    fn other_lines_are_refused() {
        let wrong = [
            "",
            "ok",
            "ok x",
            "ok 1 ",
            "ok 1 4096",
            "ok 1 4096 at 1",
            "ok 1 4096 at 1 2 3",
            "ok 1 4096 zero,4096 zero",
            "ok 1 -1 zero",
            "ok 1 4096 new 1 2",
            "invalidate 5",
            "size",
            "size 4096 1",
            "invalidate 18446744073709551615 1",
            "hello 1 2",
            "ok 1 99999999999999999999 zero",
            "ok 1 4096 new 1 2 from 3",
            "ok 1 4096 new 1 2 zero 1",
        ];
        for line in wrong {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_program_says_its_shape_and_its_files() {
        let mut hello = Hello::default();
        for line in [GREETING, "size 1048576", "data r /a b", "granule 4096", "data w /c"] {
            assert_eq!(hello.line(line), Ok(None), "{line}");
        }
        assert_eq!(hello.line("ready"), Ok(Some(Shape { size: 1 << 20, granule: 4096 })));
        assert_eq!(hello.data, [("/a b".into(), Access::Read), ("/c".into(), Access::Write)]);
        assert!(!hello.discards);
        hello.line("discards").unwrap();
        assert!(hello.discards);
        let other = Hello::default().line("blockyard-map 2").unwrap_err().to_string();
        assert_eq!(other, "it sent \"blockyard-map 2\" at its start, not \"blockyard-map 1\"");
        let mut hello = Hello::default();
        hello.line(GREETING).unwrap();
        let missing = hello.line("ready").unwrap_err();
        assert_eq!(missing.to_string(), "it was ready and had sent no size");
        assert!(hello.line("size many").is_err() && hello.line("data x /a").is_err());
    }
}
