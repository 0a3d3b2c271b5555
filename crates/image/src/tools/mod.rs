//! Work on whole images, while no guest uses them: what `blockyard image` does, without its command
//! line.
//!
//! ```text
//!   disk      an image with its name, for errors              map       the list of extents
//!   reactors  executors, on one thread or several
//!   compare   whether two disks are the same             compress  whole clusters
//!   source    parts of disks, one behind another
//!   convert   them into another disk                      create    new images
//!   commit    an image into the one below it             rebase    another backing file
//!   resize    another size                               details   snapshots and bitmaps
//!   measure   how large a new image would be
//!   file      one image by itself, as its format has it
//! ```
//! In: chains, opened by the caller. Out: results for people and programs; errors that name the
//! image. What must hold: an image that is only read is never written to; each command says at its
//! top what a power cut leaves.

mod commit;
mod compare;
mod compress;
mod convert;
mod create;
mod details;
mod disk;
mod file;
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
pub use map::map;
pub use measure::{Measure, measure};
pub use reactors::on_reactor;
pub use rebase::{NewBacking, RebaseOptions, rebase, set_backing};
pub use resize::{NewSize, resize};
pub use source::{Part, size_of};
