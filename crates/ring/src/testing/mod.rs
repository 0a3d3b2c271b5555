//! What the tests of this crate have in common: waits with a limit, and processes of their own.

pub mod own_process;
pub mod waits;
