//! An open export of a server: its properties, and what all reactors share.
//!
//! In: a URI. Out: the export's terms, and the hub.
//!
//! What must hold: an export that is open for writing has only one connection, so that a flush
//! covers all acknowledged writes. So has one whose server does not promise that connections are
//! equivalent (NBD_FLAG_CAN_MULTI_CONN). Then all reactors use one [`Hub`].

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::dial::dial;
use super::export::{Export, unsuitable};
use super::hub::Hub;
use super::options::Options;
use blockyard_nbd::negotiate::Terms;
use blockyard_nbd::uri::Uri;
use blockyard_nbd::wire::export;
use blockyard_nbd::{NbdError, NbdErrorKind};
use blockyard_ring::semaphore::Semaphore;

/// Maximum number of bytes of reads and writes that are in the hub at a time. It bounds the memory
/// of their copies.
const HUB_BYTES: u64 = 16 << 20;

/// An open export; see the module documentation.
#[derive(Debug)]
pub struct Remote {
    export: Arc<Export>,
    hub: OnceLock<Hub>,
    /// Has a permit for each byte that may be in the hub.
    hub_bytes: Semaphore,
    /// Held while the hub is started.
    starting: Mutex<()>,
}

impl Remote {
    /// Connects to the export of the URI `text`, and checks that the export can be used.
    pub fn open(text: &str, read_only: bool, options: Options) -> Result<Arc<Self>, NbdError> {
        let uri = Uri::parse(text)?;
        let dialed = dial(&uri, options.timeout)?;
        let terms = dialed.terms.clone();
        if !read_only {
            if terms.has(export::READ_ONLY) {
                return Err(NbdError::new(
                    NbdErrorKind::ReadOnly,
                    "the server offers this export for reading only",
                ));
            }
            if terms.size % crate::SECTOR != 0 {
                return Err(unsuitable(format!(
                    "its size of {} bytes is no multiple of a sector: open it for reading only",
                    terms.size
                )));
            }
            if !terms.has(export::SEND_FLUSH) {
                tracing::warn!(
                    "image {uri}: the server offers no flush: answered writes count as durable"
                );
            }
        }
        let (idle, lost) = (Mutex::new(Some(dialed)), OnceLock::new());
        let export = Arc::new(Export { uri, options, read_only, terms, idle, lost });
        let (hub, hub_bytes) = (OnceLock::new(), Semaphore::new(HUB_BYTES));
        Ok(Arc::new(Remote { export, hub, hub_bytes, starting: Mutex::default() }))
    }

    pub fn terms(&self) -> &Terms {
        &self.export.terms
    }

    /// Returns whether each reactor may have a connection of its own.
    pub(super) fn is_shared_out(&self) -> bool {
        self.export.read_only && self.export.terms.has(export::CAN_MULTI_CONN)
    }

    /// Starts the hub, unless a reactor has started it already.
    pub(super) fn start_hub(&self) -> io::Result<()> {
        let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.hub.get().is_none() {
            let _ = self.hub.set(Hub::start(&self.export)?);
        }
        Ok(())
    }

    pub(super) fn hub(&self) -> Option<&Hub> {
        self.hub.get()
    }

    pub(super) fn hub_bytes(&self) -> &Semaphore {
        &self.hub_bytes
    }

    pub(super) fn export(&self) -> &Arc<Export> {
        &self.export
    }
}
