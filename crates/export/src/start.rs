//! Reasons why a queue cannot start.

use std::error::Error;
use std::fmt;

/// The part of a start that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartKind {
    /// The queue's reactor has ended.
    Ended,
    /// The disk cannot be opened on the reactor.
    Disk,
    /// The guest's ring, its memory or its in-flight region cannot be used.
    Ring,
}

/// Displayed as `context: source`.
#[derive(Debug)]
pub struct StartError {
    pub kind: StartKind,
    /// The step that failed.
    pub context: String,
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

impl StartError {
    pub fn ended() -> Self {
        StartError { kind: StartKind::Ended, context: "the reactor has ended".into(), source: None }
    }

    pub fn disk(source: std::io::Error) -> Self {
        let context = "cannot open the disk on its reactor".into();
        StartError { kind: StartKind::Disk, context, source: Some(source.into()) }
    }

    pub fn ring(
        context: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        StartError { kind: StartKind::Ring, context: context.into(), source: Some(source.into()) }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) if self.context.is_empty() => write!(f, "{source}"),
            Some(source) => write!(f, "{}: {source}", self.context),
            None => f.write_str(&self.context),
        }
    }
}

/// `source` returns nothing, because the text contains the source.
impl Error for StartError {}
