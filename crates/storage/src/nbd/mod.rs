//! Storage on an NBD server.
//!
//! ```text
//!   dial       a connection to the server, with a time limit; crate `nbd` has the protocol
//!   client     requests of one reactor, reconnecting
//!   receive    replies, checked and copied to their requests
//!   watch      detects a server that is silent or gone
//!   hub        one connection for several reactors
//!   remote     an open export
//!   options    timeouts
//!   export     what its connections share
//!   state      what the parts of a client share
//!   storage    `Storage` over all of it
//! ```
//!
//! In: a URI, and reads, writes, zeroes, trims and flushes. Out: the same on the server.
//!
//! What must hold: everything that the server sends is checked before it is used. A server that
//! sends wrong data, sends slowly or falls silent costs bounded memory and time. Acknowledged
//! writes that may be lost are never reported as durable.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_nbd::uri::{self, Host, Uri};
use blockyard_ring::Handle;

use crate::Geometry;
use crate::boxed::AnyStore;
use crate::error::StorageError;
use crate::opened::{OpenOptions, Opened};
use crate::scheme::{Scheme, StorageScheme};
use crate::storage::Capabilities;

mod client;
mod dial;
mod export;
mod hub;
pub(crate) mod options;
mod receive;
mod remote;
mod slots;
mod state;
mod storage;
mod watch;

use export::EXPORT;
pub use options::Options;
pub use remote::Remote;
pub use storage::Nbd;

impl Opened for Remote {
    fn storage(self: Arc<Self>, handle: &Handle) -> io::Result<AnyStore> {
        Ok(Rc::new(Nbd::on(&self, handle)?))
    }

    fn name(&self) -> String {
        self.export().uri.to_string()
    }

    fn kind(&self) -> &'static str {
        "nbd"
    }

    fn size(&self) -> u64 {
        self.terms().size
    }

    fn geometry(&self) -> Geometry {
        self.export().geometry()
    }

    fn capabilities(&self) -> Capabilities {
        EXPORT
    }

    /// Returns the server, which is the device that its exports share.
    fn device(&self) -> io::Result<Option<(String, bool)>> {
        let server = match &self.export().uri.host {
            Host::Tcp(name, port) => format!("nbd:{name}:{port}"),
            Host::Unix(path) => format!("nbd:{}", path.display()),
        };
        Ok(Some((server, false)))
    }
}

/// NBD URIs.
pub(crate) struct NbdScheme;

impl Scheme for NbdScheme {
    fn forms(&self) -> &'static str {
        uri::FORMS
    }

    fn owns(&self, name: &str) -> bool {
        uri::is_uri(name)
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    /// Returns the name of the export.
    fn short_name(&self, name: &str) -> Option<String> {
        let export = Uri::parse(name).ok()?.export;
        Some(if export.is_empty() { "nbd".into() } else { export })
    }

    /// Returns the folder of certificates.
    fn folder(&self, name: &str) -> Option<PathBuf> {
        Uri::parse(name).ok()?.tls_certificates
    }
}

impl StorageScheme for NbdScheme {
    fn open(&self, name: &str, options: &OpenOptions) -> Result<Arc<dyn Opened>, StorageError> {
        Ok(Remote::open(name, options.read_only, options.nbd)?)
    }

    fn normalize(&self, name: &str) -> Result<String, StorageError> {
        Ok(Uri::parse(name)?.to_string())
    }

    /// Adds the operator's certificates to the name.
    fn permit(&self, allowed: &str, name: &str) -> Option<String> {
        let (allowed, name) = (Uri::parse(allowed).ok()?, Uri::parse(name).ok()?);
        allowed.takes_in(&name).then(|| allowed.complete(&name).to_string())
    }

    fn allowance(&self, name: &str) -> String {
        Uri::parse(name).map_or_else(|_| name.into(), |uri| uri.whole_server().to_string())
    }
}
