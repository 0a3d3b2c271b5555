//! The process of a server and its host, without disks and configuration.
//!
//! - Its output and its end: `log`, `panics`.
//! - What its parent has passed: `inherited`, `supervisor`.
//! - Processes and files beside it: `launcher`, `journals`, `looks`.
//! - Waits of the unit tests: `awaited`.

#[cfg(test)]
pub mod awaited;
pub mod inherited;
pub mod journals;
pub mod launcher;
pub mod log;
pub mod looks;
pub mod panics;
pub mod supervisor;
