//! Chains: an image and its backing images, as files on the host.
//!
//! ```text
//!   open           a chain, image by image
//!   options        the options with which a chain is opened
//!   error          why a chain cannot be opened
//!   names          which files images may name
//!   member         one open image
//!   left           an image that the server before has just closed
//!   cache_shares   memory for L2 tables
//!   shared         backing images that several chains have in common
//!   overlay        a new image on top
//!   abandoned      overlays with a backing file that was written to without them
//!   backing        the backing image, opened for writing
//! ```
//!
//! In: a path, a format, and the folders in which backing files may lie. Out: a [`Chain`], which
//! all reactors share; each makes its own [`Image`] of it.
//!
//! Invariants: a format is given or derived from the file's name, never probed. No file outside the
//! folders is opened, whatever an image names. A chain has a bounded length.

mod abandoned;
mod backing;
mod cache_shares;
mod error;
mod left;
mod member;
mod names;
mod open;
mod options;
pub(crate) mod overlay;
mod shared;
#[cfg(test)]
mod tests;

pub use backing::WritableBacking;
pub use error::ChainError;
pub use left::LeftImage;
pub use member::ChainLayer;
pub(crate) use member::shared_layers;
pub(crate) use names::Allowed;
pub use names::{MAX_DEPTH, names_a_path};
pub use open::{Chain, Opener};
pub use options::{ChainOptions, OpenedFiles};
pub use overlay::GrownChain;
pub use shared::SharedImages;
