//! Reads small files that an operator names: configuration, costs, certificates, keys.
//!
//! In: a path. Out: the file's bytes or text, or an error that names the file. What must hold: no
//! file makes the reader wait (a pipe without a writer) or fill the memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags};

/// Most bytes of such a file.
pub const MAX_BYTES: u64 = 16 << 20;

/// Why a small file cannot be read. The errors have no `source`, because their text includes it.
#[derive(Debug, thiserror::Error)]
pub enum SmallFileError {
    #[error("{}: cannot read it: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: cannot read it: it is {kind}, and must be a regular file", path.display())]
    Kind { path: PathBuf, kind: &'static str },
    #[error("{}: cannot read it: it has more than {} MiB", path.display(), MAX_BYTES >> 20)]
    TooLarge { path: PathBuf },
    #[error("{}: it is no text: byte {at} is not UTF-8", path.display())]
    NotText { path: PathBuf, at: usize },
}

impl SmallFileError {
    /// Returns whether there is no such file.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }
}

/// Returns the bytes of a file.
pub fn read(path: &Path) -> Result<Vec<u8>, SmallFileError> {
    let failed = |error| SmallFileError::Io { path: path.into(), error };
    let wrong = |kind| SmallFileError::Kind { path: path.into(), kind };
    let file = open(path).map_err(|error| match error.raw_os_error() {
        Some(errno) if errno == rustix::io::Errno::NXIO.raw_os_error() => {
            wrong("a socket or a device without a driver")
        }
        _ => failed(error),
    })?;
    if let Some(kind) = other_kind(&file).map_err(failed)? {
        return Err(wrong(kind));
    }
    let mut bytes = Vec::new();
    // Files of /proc have more bytes than their size says.
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(SmallFileError::TooLarge { path: path.into() });
    }
    Ok(bytes)
}

/// Returns the text of a file.
pub fn read_text(path: &Path) -> Result<String, SmallFileError> {
    String::from_utf8(read(path)?).map_err(|e| SmallFileError::NotText {
        path: path.into(),
        at: e.utf8_error().valid_up_to(),
    })
}

/// Opens a file without waiting for the other end of a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

/// Returns what the file is, if it is no regular file.
fn other_kind(file: &File) -> io::Result<Option<&'static str>> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    Ok((kind != FileType::RegularFile).then(|| name_of(kind)))
}

/// Returns a kind of file in words.
pub fn name_of(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a folder",
        FileType::Fifo => "a pipe",
        FileType::BlockDevice => "a block device",
        FileType::CharacterDevice => "a character device",
        FileType::Socket => "a socket",
        _ => "another kind of file",
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    #[test]
    fn only_small_regular_files_are_read_and_errors_name_the_file() {
        let folder = std::env::temp_dir().join(format!("blockyard-small-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name);
        std::fs::write(path("text"), "reactors = 2\n").unwrap();
        assert_eq!(read_text(&path("text")).unwrap(), "reactors = 2\n");
        assert!(read_text(Path::new("/proc/self/status")).unwrap().starts_with("Name:"));
        mkfifoat(CWD, path("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        std::fs::write(path("bytes"), b"ab\xff").unwrap();
        for (name, len) in [("largest", MAX_BYTES), ("larger", MAX_BYTES + 1), ("huge", 1 << 40)] {
            File::create(path(name)).unwrap().set_len(len).unwrap();
        }
        for (name, expected) in [
            ("none", "cannot read it: No such file"),
            ("pipe", "cannot read it: it is a pipe, and must be a regular file"),
            ("", "it is a folder"),
            ("/dev/null", "it is a character device"),
            ("socket", "it is a socket"),
            ("larger", "it has more than 16 MiB"),
            ("huge", "it has more than 16 MiB"),
            ("bytes", "it is no text: byte 2"),
        ] {
            let path = path(name);
            let error = read_text(&path).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with(&format!("{}: ", path.display())), "{text}");
            assert!(text.contains(expected), "{text}");
            assert_eq!(error.is_missing(), name == "none", "{text}");
        }
        assert_eq!(read(&path("largest")).unwrap().len() as u64, MAX_BYTES);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
