//! Block nodes of qemu-storage-daemon for an image and its backing images.
//!
//! In: the files of a chain. Out: options `--blockdev`. What must hold: every file of the chain has
//! the same cache mode and io_uring. If qemu-storage-daemon opened the backing images by itself, it
//! would read them through the page cache with threads, and Blockyard would not.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A file of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageFile {
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: &'static str,
}

impl ImageFile {
    pub fn new(path: impl Into<PathBuf>, format: &'static str) -> Self {
        ImageFile { path: path.into(), format }
    }
}

/// Name of the node of the image that a client uses.
pub const TOP: &str = "r0";

/// Returns the arguments for a chain. Its first file is the image, each next file backs the one
/// before it. `cached`: through the page cache.
pub fn arguments(chain: &[ImageFile], cached: bool) -> Vec<OsString> {
    let direct = if cached { "off" } else { "on" };
    let mut arguments = Vec::new();
    // A node must exist before another node names it.
    for (number, ImageFile { path, format }) in chain.iter().enumerate().rev() {
        let read_only = if number > 0 { ",read-only=on" } else { "" };
        let backing = match number + 1 < chain.len() {
            true => format!(",backing=r{}", number + 1),
            false => String::new(),
        };
        let mut file = OsString::from(format!("driver=file,node-name=f{number},filename="));
        file.push(escaped(path));
        file.push(format!(",aio=io_uring,cache.direct={direct}{read_only}"));
        let format = format!(
            "driver={format},node-name=r{number},file=f{number},cache.direct={direct}{read_only}{backing}"
        );
        arguments.extend(["--blockdev".into(), file, "--blockdev".into(), format.into()]);
    }
    arguments
}

/// Returns the path with its commas doubled, because a comma ends an option's value.
fn escaped(path: &Path) -> OsString {
    match path.to_str() {
        Some(text) => text.replace(',', ",,").into(),
        None => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_a_chain_has_its_nodes_and_the_same_cache_mode() {
        let chain = [
            ImageFile::new("/a,b/top.qcow2", "qcow2"),
            ImageFile::new("/middle.qcow2", "qcow2"),
            ImageFile::new("/base.img", "raw"),
        ];
        let nodes = |cached| {
            let arguments = arguments(&chain, cached);
            assert!(arguments.iter().step_by(2).all(|word| word == "--blockdev"));
            let nodes = arguments.into_iter().skip(1).step_by(2);
            nodes.map(|node| node.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(
            nodes(false),
            [
                "driver=file,node-name=f2,filename=/base.img,aio=io_uring,cache.direct=on,read-only=on",
                "driver=raw,node-name=r2,file=f2,cache.direct=on,read-only=on",
                "driver=file,node-name=f1,filename=/middle.qcow2,aio=io_uring,cache.direct=on,read-only=on",
                "driver=qcow2,node-name=r1,file=f1,cache.direct=on,read-only=on,backing=r2",
                "driver=file,node-name=f0,filename=/a,,b/top.qcow2,aio=io_uring,cache.direct=on",
                "driver=qcow2,node-name=r0,file=f0,cache.direct=on,backing=r1",
            ]
        );
        assert!(nodes(true).iter().all(|node| node.contains(",cache.direct=off")));
        assert_eq!(arguments(&chain[2..], false).len(), 4);
    }
}
