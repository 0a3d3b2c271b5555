//! Serves disks of your own to virtual machines and to this host.
//!
//! A *target* decides what a disk contains. Write one in two ways:
//!
//! - [`Map`] says where each range of the disk lies: in which file or device, at which offset. The
//!   data never reach your code. Blockyard remembers the answers.
//! - [`Device`] reads, writes and flushes the data itself.
//!
//! A [`Yard`] serves targets, and disk images, by vhost-user, NBD, ublk and Xen, with limits, fair
//! shares and statistics.
//!
//! ```no_run
//! use blockyard::{Disk, Extent, Files, Handle, Map, Place, Question, Shape, Target, Yard};
//!
//! /// Two files, one after the other.
//! struct Joined {
//!     first: u64,
//! }
//!
//! impl Map for Joined {
//!     async fn locate(&self, asked: Question) -> std::io::Result<Vec<Extent>> {
//!         let (file, offset, len) = match asked.offset < self.first {
//!             true => (0, asked.offset, asked.len.min(self.first - asked.offset)),
//!             false => (1, asked.offset - self.first, asked.len),
//!         };
//!         Ok(vec![Extent { len, place: Place::At { file, offset } }])
//!     }
//!
//!     async fn flush(&self, _moved: &[std::ops::Range<u64>]) -> std::io::Result<()> {
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use blockyard::Access::Write;
//! let shape = Shape { size: 2 << 30, granule: 1 << 20 };
//! let target = Target::map("joined", shape, async |files: Files, _: Handle| {
//!     Ok(Joined { first: files.data_len[0] })
//! });
//! let target = target.data("first.img", Write).data("second.img", Write);
//! let yard = Yard::start(1)?;
//! yard.serve(Disk::target("joined", target).vhost_user("/run/joined.sock"))?;
//! # Ok(())
//! # }
//! ```
//!
//! # What a target may count on
//!
//! - It runs on a thread of its own, so it may block, but then it answers nothing else meanwhile.
//! - A write is durable when a flush of the disk that began after its answer has succeeded.
//!   [`Map`] has the order of a flush.
//! - A power cut may keep or lose each sector of a write that no flush covers.
//! - If the process is killed, a disk of a map has what its map had made durable, or written to its
//!   own files.
//!
//! # What a target cannot do
//!
//! It cannot harm other disks. If it panics, hangs, or answers nonsense, requests of its own disk
//! fail. The log has one line for each kind of fault. But an abort, an exit of the process, a stack
//! overflow and `panic = "abort"` end all disks.

#![deny(missing_docs)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod disk;
mod error;
mod exports;
mod handover;
#[cfg(feature = "testing")]
pub mod testing;
mod yard;

pub use blockyard_storage::CacheMode;
pub use blockyard_storage::targets::{
    Access, Device, Discard, Extent, Figures, Files, Fill, Handle, Lent, Limits, Lock, Locked, Map,
    OwnFile, Place, Question, Shape, Target, TargetError, TargetErrorKind,
};
pub use disk::Disk;
pub use error::{Error, ErrorKind};
pub use yard::{Counts, Ended, HandedOver, Resized, Statistics, Yard};

/// The code blocks of the guide, which the documentation tests compile.
#[cfg(all(doctest, feature = "testing"))]
#[doc = include_str!("../../../docs/own-target.md")]
struct Guide;
