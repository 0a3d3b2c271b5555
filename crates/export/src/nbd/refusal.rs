//! Refusals of options, for the client and for the log.

use blockyard_nbd::wire::rep;

/// Why an option is refused. The protocol has an error reply for each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// The server does not know the option.
    Unsupported,
    /// The server does not allow what the client asks for.
    Policy,
    /// The option's data are wrong, or the option is wrong after an earlier one.
    Invalid,
    TlsRequired,
    UnknownExport,
    TooBig,
    ExtendedHeaders,
}

/// The refusal of an option. No lower error causes it. The client gets the kind and the context.
#[derive(Debug, thiserror::Error)]
#[error("{context}")]
pub struct Refusal {
    pub kind: RefusalKind,
    pub context: String,
}

impl Refusal {
    pub fn new(kind: RefusalKind, context: impl Into<String>) -> Self {
        Refusal { kind, context: context.into() }
    }

    pub fn invalid(context: &str) -> Self {
        Refusal::new(RefusalKind::Invalid, context)
    }

    /// Returns the protocol's number of the error reply.
    pub fn reply(&self) -> u32 {
        match self.kind {
            RefusalKind::Unsupported => rep::ERR_UNSUP,
            RefusalKind::Policy => rep::ERR_POLICY,
            RefusalKind::Invalid => rep::ERR_INVALID,
            RefusalKind::TlsRequired => rep::ERR_TLS_REQD,
            RefusalKind::UnknownExport => rep::ERR_UNKNOWN,
            RefusalKind::TooBig => rep::ERR_TOO_BIG,
            RefusalKind::ExtendedHeaders => rep::ERR_EXT_HEADER_REQD,
        }
    }
}
