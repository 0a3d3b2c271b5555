//! The API of a running server, and `blockyard ctl`.
//!
//! ```text
//!   calls     each call: what it answers, and what the server does
//!   wrong     bodies, parameters and paths with mistakes
//!   hostile   clients that send or read nothing, or too much
//!   command   `blockyard ctl`
//!   backup    `backup`
//!   fork      `fork`
//!   holds     `drain` and `disconnect`
//!   hung      disks on storage that hangs
//!   dead      disks on a file system that does not answer
//!   persist   changes that a restart keeps
//!   events    the stream of events
//!   wait      `ctl wait`, which follows that stream
//!   sandbox   disks outside of the folders of the server
//!   metrics   metrics and figures under load
//!   exposition  a strict reader of the metrics' text
//!   blocks    blocks that a guest writes and reads
//! ```

#[path = "../common/mod.rs"]
mod common;
mod server;

mod backup;
mod blocks;
mod calls;
mod command;
mod dead;
mod events;
mod exposition;
mod fork;
mod holds;
mod hostile;
mod hung;
mod metrics;
mod persist;
mod sandbox;
mod wait;
mod wrong;
