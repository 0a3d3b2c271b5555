//! Image locks: this crate opens an image that QEMU has open, and QEMU opens an image that this
//! crate has open.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use blockyard_image::{CacheMode, ImageFile, OpenError, OpenOptions};

use super::peer::Scratch;

fn open(path: &Path, read_only: bool) -> Result<ImageFile, OpenError> {
    ImageFile::open(&OpenOptions::new(path, read_only, CacheMode::Writeback))
}

/// A `qemu-io` process that has the file open until this is dropped.
struct Qemu(Child);

impl Qemu {
    fn open(path: &Path, read_only: bool) -> Option<Self> {
        let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/tool");
        let mut command = Command::new(tool);
        command.arg("qemu-io").args(read_only.then_some("-r")).args(["-f", "raw"]).arg(path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let _ = child.stdin.as_mut().unwrap().write_all(b"read 0 512\n");
        let mut out = BufReader::new(child.stdout.as_mut().unwrap());
        let mut line = String::new();
        while out.read_line(&mut line).unwrap() > 0 {
            if line.contains("read 512/512") {
                return Some(Qemu(child));
            }
        }
        assert!(!child.wait().unwrap().success(), "{line}");
        None
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // `qemu-io` exits at the end of its input.
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
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
