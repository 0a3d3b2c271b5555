//! What happens to requests for which the host has no space.

use std::fmt;
use std::str::FromStr;

/// What happens to a request if the host has no space for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnEnospc {
    /// The request fails.
    #[default]
    Error,
    /// The request waits until the disk is resumed.
    Pause,
}

/// Error of a text that names no such behaviour.
#[derive(Debug, thiserror::Error)]
#[error("\"{0}\" is no answer to a full host: use error or pause")]
pub struct UnknownOnEnospc(String);

impl FromStr for OnEnospc {
    type Err = UnknownOnEnospc;

    fn from_str(text: &str) -> Result<Self, UnknownOnEnospc> {
        match text {
            "error" => Ok(OnEnospc::Error),
            "pause" => Ok(OnEnospc::Pause),
            _ => Err(UnknownOnEnospc(text.into())),
        }
    }
}

impl fmt::Display for OnEnospc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnEnospc::Error => "error",
            OnEnospc::Pause => "pause",
        })
    }
}
