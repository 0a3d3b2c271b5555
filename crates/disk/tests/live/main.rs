//! Snapshot, commit, stream and backup of a served disk: under load on several reactors; errors;
//! and the files afterwards, which QEMU checks.

mod activated;
mod backup;
mod cuts;
mod load;
mod mistakes;
mod peer;
mod remembered;
mod rounds;
mod shared;
