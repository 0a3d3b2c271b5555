//! The thread of the API: accepts connections, checks who connects, and bounds each connection.
//!
//! What must hold: a client that sends nothing, reads nothing or does either slowly occupies one of
//! a bounded number of connections, for a bounded time, and bounded memory.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use blockyard_ring::sandbox::{self, Kind};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_io_timeout::TimeoutStream;

use crate::access::{Access, Peer};
use crate::operator::Operator;
use crate::routes;

/// Maximum number of connections. Further ones wait in the socket's queue.
const MAX_CONNECTIONS: usize = 64;

/// Maximum number of threads that run calls.
pub(crate) const THREADS: usize = 8;

/// How long a client may take to send the header of its first or next request.
const HEADER_TIME: Duration = Duration::from_secs(10);

/// How long a client may read nothing of an answer.
const WRITE_TIME: Duration = Duration::from_secs(10);

/// Maximum size of a connection's buffer in bytes. It bounds a request's header.
const MAX_BUFFER: usize = 64 << 10;

/// Pause after a connection could not be accepted, for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running API. Dropping it ends the thread; calls that run are not waited for.
pub struct Api {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Api {
    /// Starts the thread.
    pub fn start(
        listener: UnixListener,
        access: Access,
        operator: Arc<dyn Operator>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(THREADS)
            .thread_name("api call")
            .build()?;
        let listener = {
            let _context = runtime.enter();
            tokio::net::UnixListener::from_std(listener)?
        };
        let (stop, stopped) = oneshot::channel();
        let router = routes::router(operator);
        let thread = std::thread::Builder::new().name("api".into()).spawn(move || {
            sandbox::confine(Kind::Control);
            runtime.block_on(async {
                tokio::select! {
                    () = accept(listener, access, router) => {}
                    _ = stopped => {}
                }
            });
            runtime.shutdown_background();
        })?;
        Ok(Api { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: tokio::net::UnixListener, access: Access, router: Router) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = connections.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => match access.check(&stream) {
                Ok(peer) => drop(tokio::spawn(serve(stream, peer, router.clone(), permit))),
                Err(peer) => tracing::warn!("api: refused {peer}"),
            },
            Err(e) => {
                tracing::warn!("api: cannot accept a connection: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(stream: UnixStream, peer: Peer, router: Router, _permit: OwnedSemaphorePermit) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIME));
    let service = TowerToHyperService::new(router.layer(axum::Extension(peer)));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(MAX_BUFFER)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    if let Err(e) = connection.await {
        tracing::debug!("api: connection of {peer}: {e}");
    }
}
