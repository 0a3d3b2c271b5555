//! Changes of a closed image, held exclusively. Each is atomic: a power cut leaves the old image or
//! the new one.
//!
//! ```text
//!   change     a change of tables: checks the image, then switches the header
//!   snapshot   internal snapshots
//!   bitmap     persistent bitmaps
//!   resize     the size of the disk
//!   empty      removes all data
//!   amend      options in the header
//!   backing    the backing file's name
//! ```

pub mod amend;
pub mod backing;
pub mod bitmap;
mod change;
pub mod empty;
pub mod resize;
pub mod snapshot;
