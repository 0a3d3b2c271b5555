//! Synchronization of reactors that share an image: locks of clusters, and epochs of their readers.

pub mod clusters_held;
pub mod epoch;
