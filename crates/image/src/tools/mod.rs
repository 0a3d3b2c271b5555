//! Work on whole images that no guest uses: what `blockyard image` does, without its command line.
//!
//! ```text
//!   reactors   executors, on one thread or several
//!   disk       a chain with its name, for errors
//!   file       opens one image by itself
//!   create     creates images
//!   unnamed    a new image that has no name until it is complete
//!   overlay    creates an overlay of an image that is still in use
//!   inspect    lists, measures, compares
//!   copy       copies ranges of disks to another disk
//!   change     changes the size or the backing file; commits
//!   journal    the journal of a server that died
//! ```
//!
//! In: chains, opened by the caller. Out: results for users and programs; errors that name the
//! image. Invariants: a read-only image is never written to. The documentation of each module says
//! what a power cut leaves.

mod change;
mod copy;
mod create;
mod disk;
mod file;
mod inspect;
mod journal;
mod overlay;
mod reactors;
mod unnamed;

pub use crate::copying::sweep::Progress;
pub use change::commit::{commit, make_empty};
pub use change::rebase::{NewBacking, RebaseOptions, rebase, set_backing};
pub use change::resize::{NewSize, resize};
pub use copy::backup::{BackupCopy, BackupTarget, Lookup};
pub use copy::convert::{ConvertOptions, convert};
pub use copy::source::{Part, size_of};
pub use create::{NewImage, create};
pub use disk::{Disk, close};
pub use file::{on_file, open_file};
pub use inspect::compare::{Comparison, compare};
pub use inspect::details::{Details, details};
pub use inspect::map::map;
pub use inspect::measure::{Measure, measure};
pub(crate) use journal::session_of;
pub use journal::{Pending, apply_journal, apply_journal_of, discard_journal, pending_journal};
pub use overlay::{NewOverlay, OverlayBase};
pub use reactors::on_reactor;
