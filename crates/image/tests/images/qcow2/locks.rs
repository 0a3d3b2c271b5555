//! Image locks: this crate opens an image that QEMU has open, and QEMU opens an image that this
//! crate has open.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use blockyard_image::{CacheMode, ImageFile, OpenError, OpenOptions};

use super::peer::Scratch;
use crate::tools;

fn open(path: &Path, read_only: bool) -> Result<ImageFile, OpenError> {
    ImageFile::open(&OpenOptions::new(path, read_only, CacheMode::Writeback))
}

/// A `qemu-io` process that has the file open until this is dropped.
struct Qemu {
    process: Child,
    out: Option<BufReader<ChildStdout>>,
}

impl Qemu {
    fn open(path: &Path, read_only: bool) -> Option<Self> {
        let mut command = tools::tool("qemu-io");
        command.args(read_only.then_some("-r")).args(["-f", "raw"]).arg(path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let _ = child.stdin.as_mut().unwrap().write_all(b"read 0 512\n");
        let pipe = child.stdout.take().unwrap();
        // Made before the wait, so that a wait that fails leaves no process.
        let mut qemu = Qemu { process: child, out: None };
        let (has_read, out) = tools::within("qemu-io reads the file, or ends", move || {
            let mut out = BufReader::new(pipe);
            let has_read = out.by_ref().lines().any(|line| line.unwrap().contains("read 512/512"));
            (has_read, out)
        });
        // It writes more, and would end if the pipe had no reader.
        qemu.out = Some(out);
        if has_read {
            return Some(qemu);
        }
        assert!(!tools::end(&mut qemu.process, "qemu-io").success(), "it has read nothing");
        None
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // `qemu-io` exits at the end of its input.
        drop(self.process.stdin.take());
        if std::thread::panicking() {
            let _ = self.process.kill();
        }
        tools::end(&mut self.process, "qemu-io");
    }
}

#[test]
fn readers_share_an_image_with_qemu_and_writers_do_not() {
    let scratch = Scratch::new("locks");
    let path = scratch.path("disk.raw");
    std::fs::write(&path, [0; 4096]).unwrap();
    for (theirs, ours) in [(true, true), (true, false), (false, true), (false, false)] {
        let both = theirs && ours;
        let what = format!("read only: QEMU {theirs}, here {ours}");
        {
            let _qemu = Qemu::open(&path, theirs).unwrap();
            let result = open(&path, ours);
            assert_eq!(result.is_ok(), both, "QEMU first; {what}: {result:?}");
            assert!(
                result.is_ok() || matches!(result, Err(OpenError::Locked { .. })),
                "{result:?}"
            );
        }
        let _here = open(&path, ours).unwrap();
        assert_eq!(Qemu::open(&path, theirs).is_some(), both, "QEMU second; {what}");
    }
}
