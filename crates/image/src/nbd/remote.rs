//! One export of a server, as an image that is open: what is known of it, and what all reactors share.
//!
//! In: a URI. Out: facts, and [`Nbd`] storage for each reactor. What must hold: an export that is written to has one
//! connection at a time, so that its flush covers all that was acknowledged; so has one whose server does not promise that
//! several are as good as one (NBD_FLAG_CAN_MULTI_CONN). Then reactors go through a [`Hub`].

use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use blockyard_ring::Handle;

use super::client::Client;
use super::dial::{Dialed, dial};
use super::hub::Hub;
use super::negotiate::Terms;
use super::storage::Nbd;
use super::uri::{Host, Uri};
use super::wire::export;

/// How patient a remote image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long requests wait for a lost connection to come back.
    pub reconnect: Duration,
    /// How long a server may take for an answer, before the connection counts as lost; and for opening one.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options { reconnect: Duration::from_secs(30), timeout: Duration::from_secs(30) }
    }
}

/// What all connections to an export share.
#[derive(Debug)]
pub struct Export {
    pub uri: Uri,
    pub options: Options,
    pub read_only: bool,
    /// Of the first connection; those of later ones must not be worse.
    pub terms: Terms,
    /// A connection that nobody uses at the moment.
    idle: Mutex<Option<Dialed>>,
    /// What was acknowledged may be gone: why.
    lost: OnceLock<String>,
}

/// See the module's page.
#[derive(Debug)]
pub struct Remote {
    export: Arc<Export>,
    hub: OnceLock<Hub>,
    /// Whoever starts the hub.
    starting: Mutex<()>,
}

impl Remote {
    pub fn open(text: &str, read_only: bool, options: Options) -> Result<Arc<Self>, String> {
        let uri = Uri::parse(text)?;
        let dialed = dial(&uri, options.timeout)?;
        let terms = dialed.terms.clone();
        if !read_only {
            if terms.has(export::READ_ONLY) {
                return Err(crate::open::READ_ONLY_EXPORT.into());
            }
            if terms.size % crate::SECTOR != 0 {
                return Err(format!("its {} bytes are no whole sectors: it can be read only", terms.size));
            }
            if !terms.has(export::SEND_FLUSH) {
                tracing::warn!("image {uri}: the server offers no flush: what it has answered counts as durable");
            }
        }
        let (idle, lost) = (Mutex::new(Some(dialed)), OnceLock::new());
        let export = Arc::new(Export { uri, options, read_only, terms, idle, lost });
        Ok(Arc::new(Remote { export, hub: OnceLock::new(), starting: Mutex::default() }))
    }

    pub fn terms(&self) -> &Terms {
        &self.export.terms
    }

    pub fn uri(&self) -> &Uri {
        &self.export.uri
    }

    /// The server, as the device that exports of the same one share.
    pub fn server(&self) -> String {
        match &self.export.uri.host {
            Host::Tcp(name, port) => format!("nbd:{name}:{port}"),
            Host::Unix(path) => format!("nbd:{}", path.display()),
        }
    }

    /// The export on one reactor.
    pub fn storage(self: &Arc<Self>, handle: &Handle) -> io::Result<Nbd> {
        let export = &self.export;
        if export.read_only && export.terms.has(export::CAN_MULTI_CONN) {
            return Ok(Nbd::direct(self, Rc::new(Client::new(handle, export))));
        }
        let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.hub.get().is_none() {
            let _ = self.hub.set(Hub::start(export)?);
        }
        Ok(Nbd::through_hub(self))
    }

    pub(super) fn hub(&self) -> Option<&Hub> {
        self.hub.get()
    }

    pub(super) fn export(&self) -> &Arc<Export> {
        &self.export
    }
}

impl Export {
    pub fn take_idle(&self) -> Option<Dialed> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// For the next who wants one; one at most is kept.
    pub fn put_idle(&self, dialed: Dialed) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        match &*idle {
            None => *idle = Some(dialed),
            Some(_) => dialed.end(),
        }
    }

    /// What was acknowledged may be gone: nothing is written any more until the image is opened anew.
    pub fn lose(&self, why: &str) {
        let why = format!("{why}: what was acknowledged since the last flush may be lost");
        if self.lost.set(why).is_ok() {
            tracing::error!("image {}: {}", self.uri, self.lost.get().map_or("", String::as_str));
        }
    }

    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// A new connection is as good as the first was.
    pub fn check(&self, new: &Terms) -> Result<(), String> {
        let old = &self.terms;
        if new.size != old.size {
            return Err(format!("the export has {} bytes now, and had {}", new.size, old.size));
        }
        if new.minimum > old.minimum || new.maximum < old.maximum {
            return Err("the server has other limits for requests now".into());
        }
        let needed = export::SEND_FLUSH | export::SEND_FUA | export::SEND_TRIM | export::SEND_WRITE_ZEROES;
        if !self.read_only && (new.has(export::READ_ONLY) || old.flags & needed & !new.flags != 0) {
            return Err("the export can do less now than when it was opened (flags)".into());
        }
        Ok(())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(idle) = self.take_idle() {
            idle.end();
        }
    }
}
