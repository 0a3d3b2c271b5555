//! Commands on closed qcow2 images, verified by QEMU's tools.

mod agree;
mod bitmaps;
mod chains;
mod copying_down;
mod counts;
mod creation;
mod cuts;
mod damage;
mod hostile;
mod images;
mod lies;
mod peer;
mod rebacking;
mod repair_cuts;
mod resizing;
mod snapshots;
