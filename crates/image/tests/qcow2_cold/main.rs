//! What is done to closed qcow2 images, with QEMU's tools as judges.

mod agree;
mod bitmaps;
mod creation;
mod cuts;
mod damage;
mod hostile;
mod images;
mod peer;
mod repair_cuts;
