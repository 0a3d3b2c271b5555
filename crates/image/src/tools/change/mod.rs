//! Changes of existing images: what a chain contains, and which images it has.
//!
//! ```text
//!   resize   changes the size
//!   rebase   changes the backing file
//!   commit   commits an image into the one below it
//! ```

pub mod commit;
pub mod rebase;
pub mod resize;
