//! Work on the image of a disk that is being served: snapshots and streams under load, over several
//! reactors; what goes wrong; and what the host's files are afterwards, judged by QEMU.

mod cuts;
mod load;
mod mistakes;
mod peer;
mod remembered;
mod rounds;
