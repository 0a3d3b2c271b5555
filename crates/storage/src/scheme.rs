//! What a kind of storage names must be able to do.

use std::sync::Arc;

use crate::error::StorageError;
use crate::opened::{OpenOptions, Opened};

/// A kind of storage names that are no paths, and what opens them.
pub trait Scheme: Sync {
    /// Returns the syntax of such names, for messages and help.
    fn forms(&self) -> &'static str;
    /// Returns whether the name belongs to this scheme, well-formed or not.
    fn owns(&self, name: &str) -> bool;
    fn open(&self, name: &str, options: &OpenOptions) -> Result<Arc<dyn Opened>, StorageError>;
    /// Returns the normalized form, which is the same for all names of the same storage.
    fn normalize(&self, name: &str) -> Result<String, StorageError>;
    /// Returns the name to open, if the operator's `allowed` permits images to refer to `name`. It
    /// may add what only the operator knows, such as certificates.
    fn permit(&self, allowed: &str, name: &str) -> Option<String>;
    /// Returns what the operator can allow, so that the name is permitted.
    fn allowance(&self, name: &str) -> String;
}
