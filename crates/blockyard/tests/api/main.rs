//! The API of a running server, and `blockyard ctl`.
//!
//! ```text
//!   calls     each call: what it answers, and what the server does
//!   wrong     bodies, parameters and paths with mistakes
//!   hostile   clients that send or read nothing, or too much
//!   command   `blockyard ctl`
//!   persist   changes that a restart keeps
//!   sandbox   disks outside of the folders of the server
//! ```

#[path = "../common/mod.rs"]
mod common;
mod server;

mod calls;
mod command;
mod hostile;
mod persist;
mod sandbox;
mod wrong;
