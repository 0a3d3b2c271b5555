//! `blockyard image` beside `qemu-img`, which checks its output and its images.
//!
//! ```text
//!   fixture    images that QEMU creates, with all features, alone and in chains; compares JSON
//!   create     new images, compared by QEMU
//!   inspect    info, map, compare: the same output as qemu-img
//!   check      finds, reports and repairs damage
//!   convert    between all formats
//!   commit     an overlay into its backing file, or into a deeper one
//!   rebase     changes of the backing file
//!   resize     changes of the size
//!   snapshot   created, applied, deleted
//!   replace    which files `--force` replaces, and which it refuses to
//!   mutants    random damage, checked by both programs
//!   mistakes   wrong options and broken images: one line and an exit status
//! ```

#[path = "../common/mod.rs"]
mod common;
mod fixture;

mod bitmap;
mod check;
mod commit;
mod convert;
mod create;
mod inspect;
mod mistakes;
mod mutants;
mod rebase;
mod replace;
mod resize;
mod snapshot;
