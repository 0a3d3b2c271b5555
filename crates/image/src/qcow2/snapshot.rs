//! Internal snapshots.

pub mod table;
