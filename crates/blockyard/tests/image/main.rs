//! `blockyard image`, run as a program beside `qemu-img`, which is the judge of what it says and of
//! what it writes.
//!
//! ```text
//!   fixture    images of QEMU's with all there is in them, alone and in chains; JSON compared
//!   create     new images, judged by what QEMU says of them
//!   tell       info, map, compare: the same answers as qemu-img's
//!   check      damage found, told and repaired
//!   convert    from everything to everything
//!   commit     an overlay into its backing file, or a deeper one
//!   rebase     another backing file
//!   resize     another size
//!   snapshot   taken, applied, deleted
//!   replace    what `--force` replaces, and what it must not
//!   mutants    damage at random, judged by both checkers
//!   mistakes   bad options and broken images: one line and an exit status
//! ```

#[path = "../common/mod.rs"]
mod common;
mod fixture;

mod bitmap;
mod check;
mod commit;
mod convert;
mod create;
mod mistakes;
mod mutants;
mod rebase;
mod replace;
mod resize;
mod snapshot;
mod tell;
