//! Synchronization of reactors that share an image: locks of clusters, and epochs of their readers;
//! yields of long work.

pub mod clusters_held;
pub mod epoch;
pub mod pace;
