//! The thread of the API: accepts connections, checks who connects, and bounds each connection.
//!
//! What must hold: a client that sends nothing, reads nothing or does either slowly occupies one of
//! a bounded number of connections, for a bounded time, and bounded memory. Such clients shut no
//! other one out: see [`connections`](crate::bounds::connections). Connections to the
//! metrics' address do not count as connections to the API.

use std::future::poll_fn;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use blockyard_ring::sandbox::{self, Kind};
use hyper::body::Incoming;
use hyper::http::Extensions;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{oneshot, watch};
use tokio_io_timeout::TimeoutStream;

use crate::bounds::access::Access;
use crate::bounds::connections::{Accepted, Connection, Connections, follow};
use crate::bounds::limits::ClientLimits;
use crate::bounds::log::ConnectionLog;
use crate::calls::routes;
use crate::events::EventLog;
use crate::metrics::page;
use crate::metrics::scrape::{Cutoff, Scrapes};
use crate::operator::Operator;

/// How long clients may read the last events of a server that ends.
const LAST_EVENTS: Duration = Duration::from_secs(1);

/// Maximum size of a connection's buffer in bytes. It bounds a request's header.
const MAX_BUFFER: usize = 64 << 10;

/// Pause after a connection could not be accepted, for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where the API and the metrics are offered.
#[derive(Default)]
pub struct Listeners {
    /// The API's socket, and the users that may connect.
    pub api: Option<(UnixListener, Access)>,
    /// Metrics and the web page, for every process of this host.
    pub metrics: Option<TcpListener>,
}

/// The running API. Dropping it ends the thread; calls that run are not waited for.
pub struct Api {
    stop: Option<oneshot::Sender<()>>,
    acceptance: Acceptance,
    events: Arc<EventLog>,
    connections: Connections,
    thread: Option<JoinHandle<()>>,
}

/// Whether the API accepts connections. Clones are of the same API.
#[derive(Clone)]
pub struct Acceptance(watch::Sender<bool>);

impl Acceptance {
    /// Accepts no more connections, from now on. Those that come wait in the queue of the socket,
    /// which another process may have, too.
    pub fn pause(&self) {
        self.0.send_replace(false);
    }

    pub fn resume(&self) {
        self.0.send_replace(true);
    }

    pub fn is_paused(&self) -> bool {
        !*self.0.borrow()
    }
}

impl Api {
    /// Starts the thread.
    pub fn start(
        listeners: Listeners,
        limits: ClientLimits,
        operator: Arc<dyn Operator>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(routes::THREADS)
            .thread_name("api call")
            .build()?;
        let events = operator.events().clone();
        let scrapes = Scrapes::new(operator.clone(), limits);
        let acceptance = Acceptance(watch::Sender::new(true));
        let connections = Connections::new();
        let (api, metrics) = {
            let _context = runtime.enter();
            let api = listeners.api.map(|(listener, access)| {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                let router = routes::router(operator, scrapes.clone());
                let accepts = acceptance.0.subscribe();
                let door = Door { connections: connections.clone(), accepts, limits };
                io::Result::Ok(accept_api(listener, access, router, door))
            });
            let metrics = listeners.metrics.map(|listener| {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::TcpListener::from_std(listener)?;
                let (connections, accepts) = (Connections::new(), acceptance.0.subscribe());
                let door = Door { connections, accepts, limits };
                let router = page::router(scrapes.of_other_listener());
                io::Result::Ok(accept_metrics(listener, router, door))
            });
            (api.transpose()?, metrics.transpose()?)
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("api".into()).spawn(move || {
            sandbox::confine(Kind::Control);
            runtime.block_on(async {
                api.map(tokio::spawn);
                metrics.map(tokio::spawn);
                let _: Result<(), _> = stopped.await;
            });
            runtime.shutdown_background();
        })?;
        Ok(Api { stop: Some(stop), acceptance, events, connections, thread: Some(thread) })
    }

    pub fn acceptance(&self) -> &Acceptance {
        &self.acceptance
    }

    /// Accepts no more clients, because another process has the sockets. Waits at most `limit`
    /// until the connections end.
    pub fn retire(&self, limit: Duration) {
        self.acceptance.pause();
        self.events.close();
        wait_until(limit, || self.connections.are_none());
    }
}

fn wait_until(limit: Duration, is_done: impl Fn() -> bool) {
    let end = Instant::now() + limit;
    while !is_done() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.events.close();
        wait_until(LAST_EVENTS, || self.events.streams() == 0);
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What bounds the connections of a listener.
struct Door {
    connections: Connections,
    /// See [`Acceptance`].
    accepts: watch::Receiver<bool>,
    limits: ClientLimits,
}

impl Door {
    /// Waits until a connection may be accepted. Returns false if the API ends.
    async fn opens(&mut self) -> bool {
        let opens = self.accepts.wait_for(|accepts| *accepts).await.is_ok();
        opens && self.accepts.has_changed().is_ok()
    }

    /// Waits for a connection. None: no more may be accepted.
    async fn accept<T>(
        &mut self,
        mut accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Option<io::Result<(T, Accepted)>> {
        let (accepts, connections) = (self.accepts.clone(), self.connections.clone());
        let accepted = poll_fn(|context| {
            // A pause waits while this is borrowed. So nothing is accepted after it.
            let accepts = accepts.borrow();
            match *accepts {
                true => accept(context).map_ok(|stream| (stream, connections.accepted())),
                false => Poll::Pending,
            }
        });
        tokio::select! {
            _ = self.accepts.changed() => None,
            accepted = accepted => Some(accepted),
        }
    }
}

async fn accept_api(
    listener: tokio::net::UnixListener,
    access: Access,
    router: Router,
    mut door: Door,
) {
    let lines = ConnectionLog::default();
    while door.opens().await {
        let Some(accepted) = door.accept(|context| listener.poll_accept(context)).await else {
            continue;
        };
        match accepted {
            Ok(((stream, _), accepted)) => match access.check(&stream) {
                Ok(peer) => {
                    let Some(place) = door.connections.place(accepted).await else { return };
                    let name = peer.to_string();
                    let connection = door.connections.add(place);
                    let extend = move |extensions: &mut Extensions| {
                        extensions.insert(peer);
                    };
                    let client = Client { stream, name, extend };
                    tokio::spawn(serve(client, router.clone(), connection, door.limits));
                }
                Err(e) => lines.refused(&e),
            },
            Err(e) => cannot_accept(&lines, "api", &e).await,
        }
    }
}

async fn accept_metrics(listener: tokio::net::TcpListener, router: Router, mut door: Door) {
    let lines = ConnectionLog::default();
    while door.opens().await {
        let Some(accepted) = door.accept(|context| listener.poll_accept(context)).await else {
            continue;
        };
        match accepted {
            Ok(((stream, peer), accepted)) => {
                let Some(place) = door.connections.place(accepted).await else { return };
                let connection = door.connections.add(place);
                let client = Client { stream, name: peer.to_string(), extend: |_: &mut _| {} };
                tokio::spawn(serve(client, router.clone(), connection, door.limits));
            }
            Err(e) => cannot_accept(&lines, "metrics", &e).await,
        }
    }
}

async fn cannot_accept(lines: &ConnectionLog, what: &str, error: &io::Error) {
    lines.failed(what, error);
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// The other end of a connection.
struct Client<S, E> {
    stream: S,
    name: String,
    /// Adds what the calls must know of the client to a request.
    extend: E,
}

async fn serve(
    client: Client<
        impl AsyncRead + AsyncWrite + Send + 'static,
        impl Fn(&mut Extensions) + Send + 'static,
    >,
    router: Router,
    connection: Connection,
    limits: ClientLimits,
) {
    let Client { stream, name: peer, extend } = client;
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.stall));
    let cutoff = Cutoff::default();
    // What a connection adds is not a layer of the router: each layer copies all routes.
    let (activity, router) = (connection.activity(), TowerToHyperService::new(router));
    let service = service_fn(|request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        let extensions = request.extensions_mut();
        extensions.insert(cutoff.clone());
        extensions.insert(limits);
        extend(extensions);
        follow(activity.clone(), request, router.clone())
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header)
        .max_buf_size(MAX_BUFFER)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    tokio::select! {
        ended = served => if let Err(e) = ended {
            tracing::debug!("api: connection of {peer}: {e}");
        },
        () = cutoff.reached() => tracing::debug!("api: {peer} reads metrics too slowly"),
        () = connection.closed() => tracing::debug!("api: {peer} makes room for another client"),
    }
}
