//! Disks: the request types, and the path of a request from admission to its answer.
//!
//! ```text
//!   export ── Request<token> ──► LocalDisk::serve ── throttle ── filters ── image ──► ring
//!   export ◄── token, status ─── Finished         ◄─ statistics ◄───────────────────┘
//! ```
//!
//! In: requests of any protocol, one by one or as runs of adjacent requests. Out: each request's
//! token, exactly once, with a status.
//!
//! What must hold: every request is answered exactly once (the types enforce it). After a failed
//! flush no write is acknowledged. Reads and writes of a raw image take no lock and allocate no
//! memory.

// `print!` and `eprint!` panic if the stream cannot be written. `blockyard_program::output` and the
// log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod backend;
mod carried;
mod client_counts;
mod clients;
mod copy_map;
mod current_image;
mod dirty;
mod disk;
mod drain;
mod filter;
mod flush;
mod image_files;
mod in_flight;
mod layer_files;
mod leaving;
mod live;
mod local_disk;
mod observer;
mod on_enospc;
mod once_a_second;
mod pause;
mod poison;
mod quiesce;
mod quiesce_error;
mod quiesced;
mod replies;
mod request;
mod statistics;
mod throttle;
mod tracker;

pub use backend::{Backend, Delay, InactiveImage, Model, Ram, Source, SourceError};
pub use blockyard_image::Store;
pub use blockyard_ring::WriteFigures;
pub use blockyard_storage::LookupFigures;
pub use carried::{Carried, Difference};
pub use clients::ConnectedClient;
pub use copy_map::LateCopy;
pub use disk::{Disk, DiskOptions};
pub use drain::DrainState;
pub use filter::{Filter, FilterError, parse_time};
pub use flush::FlushFigures;
pub use image_files::{ImageFiles, ImagePaths, KnownFiles, PathError};
pub use live::{BackupOptions, SnapshotOptions, StartRecord, Unsuitable, Why, Work, WorkError};
pub use local_disk::{LocalDisk, Run};
pub use observer::{ClientId, DiskObserver};
pub use on_enospc::{OnEnospc, UnknownOnEnospc};
pub use poison::{LostImage, Poison, Unusable};
pub use quiesce_error::QuiesceError;
pub use request::{Failure, Finished, Op, Request, Status, Token, dropped_requests};
pub use statistics::{Counts, DiskCounts, Latencies, OpKind, Statistics, StatisticsState, Summary};
pub use throttle::sched_time;
