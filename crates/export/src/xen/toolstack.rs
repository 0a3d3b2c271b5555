//! A device and a disk as a toolstack describes them.

use std::fmt;
use std::sync::Arc;

use super::Name;

/// A device of a guest that a toolstack has created.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ToolstackDevice {
    /// The type of back end, such as `vbd`.
    pub kind: Arc<str>,
    pub domain: u16,
    pub device: Name,
}

impl ToolstackDevice {
    /// Returns the path of the back end's nodes in domain `own`.
    pub(super) fn path(&self, own: u16) -> String {
        format!("{}/{}/{}", top(own, &self.kind), self.domain, self.device.number())
    }
}

impl fmt::Display for ToolstackDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} of domain {} (backend/{})", self.device, self.domain, self.kind)
    }
}

/// Returns the path of the nodes of domain `own`, as a back end of this type.
pub(super) fn top(own: u16, kind: &str) -> String {
    format!("/local/domain/{own}/backend/{kind}")
}

/// A disk that a toolstack requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub device: ToolstackDevice,
    /// Content of `params`: text from the toolstack, at most 4096 bytes, without control
    /// characters.
    pub target: String,
    pub read_only: bool,
    pub cdrom: bool,
    pub(super) frontend: String,
    pub(super) mode: String,
}
