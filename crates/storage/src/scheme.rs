//! What a kind of names must be able to do.
//!
//! In: a name. Out: what the server must know of it before it opens it ([`Scheme`]), and for names
//! on which images lie the open itself ([`StorageScheme`]).

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::StorageError;
use crate::opened::{OpenOptions, Opened};

/// A kind of names that are no paths. The defaults are those of a storage with data that stay where
/// they are when the server closes it.
pub trait Scheme: Sync {
    /// Returns the syntax of such names, for messages and help.
    fn forms(&self) -> &'static str;
    /// Returns whether the name belongs to this scheme, well-formed or not.
    fn owns(&self, name: &str) -> bool;
    /// Returns whether the data are lost when the server closes the image.
    fn is_volatile(&self) -> bool {
        false
    }
    /// Returns whether such images only serve to measure what is above them.
    fn is_for_measurement(&self) -> bool {
        false
    }
    /// Returns whether another server can open the image and finds the same data, while this server
    /// has closed it.
    fn may_move(&self) -> bool {
        !self.is_volatile() && !self.is_for_measurement()
    }
    /// Returns whether an open reaches another program or host. Then no image is opened only to
    /// find errors.
    fn is_elsewhere(&self) -> bool {
        false
    }
    /// Returns the short name of what the name describes, for a disk without a name of its own.
    fn short_name(&self, _name: &str) -> Option<String> {
        None
    }
    /// Returns a folder of this host that an open reads, such as one of certificates. A server in
    /// a sandbox gets it.
    fn folder(&self, _name: &str) -> Option<PathBuf> {
        None
    }
    /// Returns the file of this host that an open needs. A server in a sandbox gets its folder.
    fn file(&self, _name: &str) -> Option<PathBuf> {
        None
    }
    /// Returns the program that an open starts. A server in a sandbox starts it before.
    fn program(&self, _name: &str) -> Option<PathBuf> {
        None
    }
}

/// A scheme with names that open a storage, on which images of any format may lie.
pub trait StorageScheme: Scheme {
    fn open(&self, name: &str, options: &OpenOptions) -> Result<Arc<dyn Opened>, StorageError>;
    /// Returns the normalized form, which is the same for all names of the same storage.
    fn normalize(&self, name: &str) -> Result<String, StorageError> {
        Ok(name.into())
    }
    /// Returns the name to open, if the operator's `allowed` permits images to refer to `name`. It
    /// may add what only the operator knows, such as certificates.
    fn permit(&self, allowed: &str, name: &str) -> Option<String> {
        (allowed == name).then(|| name.into())
    }
    /// Returns what the operator can allow, so that the name is permitted.
    fn allowance(&self, name: &str) -> String {
        name.into()
    }
}
