//! Chains: an image and its backing images, as files on the host.
//!
//! ```text
//!   open     a chain, image by image     options   how it is to be opened     error         why it cannot be
//!   names    what images may name        member    one open image             cache_shares  memory for L2 tables
//!   overlay  a new image on top          backing   the backing image, opened for writing
//! ```
//! In: a path, a format, and the folders in which backing files may lie. Out: a [`Chain`], which
//! may be sent to and shared by all reactors; each makes its own [`Image`] of it. What must hold: a
//! format is told or known by the file's name, never guessed; no file is opened outside the
//! folders, whatever an image names; a chain ends.

mod backing;
mod cache_shares;
mod error;
mod member;
mod names;
mod open;
mod options;
mod overlay;
#[cfg(test)]
mod tests;

pub use backing::WritableBacking;
pub use error::ChainError;
pub use member::ChainLayer;
pub(crate) use member::shared_layers;
pub use names::MAX_DEPTH;
pub use open::Chain;
pub use options::{ChainOptions, OpenedFiles};
pub use overlay::GrownChain;
