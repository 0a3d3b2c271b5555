//! A disk on a socket of its own, for protocols in which clients choose no disk.
//!
//! In: a listener and a [`Protocol`]. Out: an [`Export`]. What must hold: a connection ends when
//! its protocol has returned. The protocol answers each request before that.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockyard_disk::{ConnectedClient, Disk, Failure, LocalDisk, Op};
use blockyard_ring::{Handle, Segments, Socket};

use super::{Accepted, Accepting, Member};
use crate::acceptor::{Entrance, Registration};
use crate::budget::{self, Budget, REQUEST};
use crate::export::STOP_TIME;
use crate::log::Log;
use crate::{Client, Export, Listener, Reactors};

/// A protocol on a socket of each disk.
pub trait Protocol: 'static {
    /// Name of the export, in counts, reports and the log.
    const KIND: &'static str;

    /// Maximum number of clients of a disk. Further clients wait until one disconnects.
    const MOST_CLIENTS: usize = 128;

    /// Serves one client, until it has closed its connection. An error disconnects it, and the log
    /// says why. While a request waits for space on the host, a client that has gone still counts:
    /// the protocol receives nothing meanwhile.
    fn serve(connection: &Connection) -> impl Future<Output = io::Result<()>>;
}

/// One disk, served by protocol `P`. Drop stops it.
pub struct OneDisk<P: Protocol> {
    shared: Arc<Shared>,
    reactors: Arc<Reactors>,
    /// None: the export has ended.
    registration: Option<Registration>,
    protocol: PhantomData<fn(P)>,
}

struct Shared {
    disk: Arc<Disk>,
    log: Log,
    accepting: Arc<Accepting>,
}

/// A client, on its reactor.
pub struct Connection {
    handle: Handle,
    socket: Socket,
    client: Client,
    counted: ConnectedClient,
    served: Rc<LocalDisk>,
    budget: Budget,
    wrote: Cell<bool>,
    /// The connection takes no more requests.
    has_ended: Rc<Cell<bool>>,
}

/// The connection of a client that speaks protocol `P`.
pub(super) struct Served<P> {
    connection: Connection,
    protocol: PhantomData<P>,
}

impl<P: Protocol> OneDisk<P> {
    /// Accepts clients from now on.
    pub fn start(disk: Arc<Disk>, listener: Listener, reactors: Arc<Reactors>) -> io::Result<Self> {
        let (log, accepting) = (Log::default(), Accepting::new(P::MOST_CLIENTS));
        let shared = Arc::new(Shared { disk, log, accepting });
        let admitting = shared.clone();
        let registration =
            shared.accepting.listen(listener, &reactors, move |reactors, entrance| {
                admitting.admit::<P>(reactors, entrance)
            })?;
        shared.disk.note_export(P::KIND);
        Ok(OneDisk { shared, reactors, registration: Some(registration), protocol: PhantomData })
    }
}

impl<P: Protocol> Export for OneDisk<P> {
    /// Clients see the new size when they ask for it.
    fn resize(&mut self) {}

    fn stop(&mut self, deadline: Instant) {
        // Dropping it waits for the callback, so no client comes after this.
        if self.registration.take().is_some() {
            super::end::<Served<P>>(&self.reactors, &self.shared.disk, deadline);
        }
    }

    fn clients(&self) -> Vec<Client> {
        super::clients::<Served<P>>(&self.reactors, &self.shared.disk)
    }

    fn disconnect(&mut self, description: Option<&str>) -> Vec<Client> {
        super::disconnect::<Served<P>>(&self.reactors, &self.shared.disk, description)
    }
}

impl<P: Protocol> Drop for OneDisk<P> {
    fn drop(&mut self) {
        self.stop(Instant::now() + STOP_TIME);
    }
}

impl Shared {
    /// Gives the clients that wait to the next reactors.
    fn admit<P: Protocol>(
        self: &Arc<Self>,
        reactors: &Reactors,
        entrance: Entrance,
    ) -> io::Result<()> {
        self.accepting.admit(entrance, (&self.log, self.disk.name()), |fd| {
            let shared = self.clone();
            reactors.next().run(move |handle| shared.attend::<P>(handle, fd));
        })
    }

    fn attend<P: Protocol>(self: Arc<Self>, handle: &Handle, fd: Accepted) {
        let name = self.disk.name();
        let served = match LocalDisk::local(handle, &self.disk) {
            Ok(served) => served,
            Err(e) => {
                // Its end closes what the client may have sent, which can block, on a thread.
                drop(Socket::new(handle, fd));
                return self.log.warn(name, None, format_args!("cannot open the image: {e}"));
            }
        };
        match Served::<P>::enter(handle, fd, served) {
            Ok(served) => drop(handle.spawn(async move { served.run(&self.log).await })),
            Err(e) => self.log.warn(name, None, format_args!("cannot serve a client: {e}")),
        }
    }
}

impl<P: Protocol> Served<P> {
    /// Begins to serve the client at the other end of this socket.
    pub fn enter(handle: &Handle, fd: Accepted, served: Rc<LocalDisk>) -> io::Result<Rc<Self>> {
        super::prepare(&fd);
        let client = Client::connected(&fd);
        let socket = Socket::new(handle, fd)?;
        let counted = served.disk().client(P::KIND, client.id());
        let (wrote, has_ended) = Default::default();
        let connection = Connection {
            handle: handle.clone(),
            socket,
            client,
            counted,
            budget: Budget::of(handle, served.disk()),
            served,
            wrote,
            has_ended,
        };
        let served = Rc::new(Served { connection, protocol: PhantomData });
        super::enter(handle, &served);
        Ok(served)
    }

    /// Serves the client, until its connection ends.
    pub async fn run(self: Rc<Self>, log: &Log) {
        let Connection { handle, client, counted, served, wrote, .. } = &self.connection;
        let (disk, kind, from) = (served.disk().name(), P::KIND, &client.description);
        handle.label(&format!("disk {disk}, over {kind}"));
        log.info(disk, None, format_args!("a client connected over {kind} ({from})"));
        let end = P::serve(&self.connection).await;
        super::flush_last(served, wrote.get()).await;
        match end {
            Err(e) if !is_gone(&e) => {
                counted.ends(e.to_string());
                let what = format_args!("a client over {kind} ({from}) was disconnected: {e}");
                log.warn(disk, None, what);
            }
            _ => {
                counted.ends("it has closed its connection");
                log.info(disk, None, format_args!("a client over {kind} disconnected ({from})"));
            }
        }
    }
}

/// Returns whether the client has closed its connection, or was disconnected.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

impl<P: Protocol> Member for Served<P> {
    fn client(&self) -> &Client {
        &self.connection.client
    }

    fn disk(&self) -> Option<&Arc<Disk>> {
        Some(self.connection.served.disk())
    }

    fn end(&self, why: &'static str) {
        let Connection { counted, has_ended, socket, served, .. } = &self.connection;
        counted.ends(why);
        has_ended.set(true);
        socket.shutdown_read();
        // Its requests that wait for space fail now.
        served.release_paused();
    }

    fn shutdown(&self) {
        self.connection.socket.shutdown();
    }
}

impl Connection {
    pub fn disk(&self) -> &Arc<Disk> {
        self.served.disk()
    }

    /// Returns the next bytes that the client has sent, at most `len`. Returns none if the
    /// connection ends.
    pub async fn receive(&self, len: usize) -> io::Result<Vec<u8>> {
        // Bytes that have arrived before the end are still there.
        if self.has_ended.get() {
            return Ok(Vec::new());
        }
        let (segments, read) = self.socket.read(Segments::buffer(len)).await;
        let mut bytes = vec![0; read?];
        segments.copy_out(0, &mut bytes);
        Ok(bytes)
    }

    /// Sends these bytes. It waits for a client that does not read.
    pub async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        // A client may send at any rate what needs no disk.
        if budget::is_over(self.handle.now(), Instant::now()) {
            self.handle.yield_now().await;
        }
        self.socket.write_full(Segments::from_bytes(bytes)).await.1
    }

    /// Serves a request within the disk's budget. `data`: `len` bytes of a read or a write, else
    /// none. Returns them. The disk checks the range. What is written is durable if the disk has
    /// no write cache.
    pub async fn serve(
        &self,
        op: Op,
        (offset, len): (u64, u64),
        data: Segments,
    ) -> Result<Segments, Failure> {
        self.budget.admit(&self.handle, REQUEST, data.len() as u64).await;
        let durable = !self.disk().options().cache.write_back();
        let op = match op {
            Op::Write { fua } => Op::Write { fua: fua || durable },
            Op::WriteZeroes { unmap, fua, fast } => {
                Op::WriteZeroes { unmap, fua: fua || durable, fast }
            }
            Op::Read | Op::Flush | Op::Discard => op,
        };
        if !matches!(op, Op::Read | Op::Flush) {
            self.wrote.set(true);
        }
        let has_ended = self.has_ended.clone();
        let (request, may_wait) = ((op, offset, len), move || !has_ended.get());
        let (status, data) =
            super::serve_one(&self.handle, &self.served, request, data, may_wait).await;
        status.map(|()| data)
    }
}
