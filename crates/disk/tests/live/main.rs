//! Snapshot, commit and stream of a served disk: under load on several reactors; errors; and the
//! files afterwards, which QEMU checks.

mod activated;
mod cuts;
mod load;
mod mistakes;
mod peer;
mod remembered;
mod rounds;
mod shared;
