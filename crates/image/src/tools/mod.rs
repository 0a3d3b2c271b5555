//! Work on whole images that no guest uses: what `blockyard image` does, without its command line.
//!
//! ```text
//!   disk       a chain with its name, for errors
//!   reactors   executors, on one thread or several
//!   source     ranges of disks, concatenated
//!   map        lists extents
//!   compare    compares two disks
//!   convert    copies ranges of disks to another disk
//!   compress   writes compressed clusters
//!   create     creates images
//!   commit     commits an image into the one below it
//!   rebase     changes the backing file
//!   resize     changes the size
//!   details    lists snapshots and bitmaps
//!   measure    computes the size of a new image
//!   file       opens one image by itself
//!   journal    the journal of a server that died
//! ```
//!
//! In: chains, opened by the caller. Out: results for users and programs; errors that name the
//! image. Invariants: a read-only image is never written to. The documentation of each module says
//! what a power cut leaves.

mod commit;
mod compare;
mod compress;
mod convert;
mod create;
mod details;
mod disk;
mod file;
mod journal;
mod map;
mod measure;
mod reactors;
mod rebase;
mod resize;
mod source;

pub use crate::copying::sweep::Progress;
pub use commit::{commit, make_empty};
pub use compare::{Comparison, compare};
pub use convert::{ConvertOptions, convert};
pub use create::{NewImage, create};
pub use details::{Details, details};
pub use disk::{Disk, close};
pub use file::{on_file, open_file};
pub use journal::{Pending, apply_journal, discard_journal, pending_journal};
pub use map::map;
pub use measure::{Measure, measure};
pub use reactors::on_reactor;
pub use rebase::{NewBacking, RebaseOptions, rebase, set_backing};
pub use resize::{NewSize, resize};
pub use source::{Part, size_of};
