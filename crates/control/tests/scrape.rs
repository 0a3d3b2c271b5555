//! The listeners of the API. Clients of a large text of metrics: those that read it, and those that
//! do not. Sockets that another process has, too.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use blockyard_control::events::EventLog;
use blockyard_control::figures::Figures;
use blockyard_control::types::{
    ChangeQuery, Disconnect, Disk, DiskRow, Drain, Drained, Flushed, Fork, Job, JobRequest, Reload,
    Removed, Resize, Resized, Resumed, ServerInfo, Upgraded,
};
use blockyard_control::{
    Access, Answer, Api, ClientLimits, Departure, Kind, Listeners, Object, Operator, Problem,
};

/// Far more than a connection's buffers hold.
const TEXT: usize = 12 << 20;

/// Longer than any test: only events end a connection, or a wait for others.
const HOUR: Duration = Duration::from_secs(3600);
const UNHURRIED: ClientLimits =
    ClientLimits { header: HOUR, body: HOUR, stall: HOUR, text: HOUR, wait: HOUR };

/// Limit for events that a busy machine may delay.
const SOON: Duration = Duration::from_secs(60);

/// A server with one long line of metrics.
#[derive(Default)]
struct Long {
    events: Arc<EventLog>,
}

fn nothing<T>() -> Answer<T> {
    Err(Problem::new(Kind::NotFound, "this server has no disks"))
}

impl Operator for Long {
    fn server(&self) -> ServerInfo {
        ServerInfo {
            version: "1".into(),
            pid: 1,
            since: 1,
            disks: 0,
            config: None,
            failed: Vec::new(),
        }
    }

    fn events(&self) -> &Arc<EventLog> {
        &self.events
    }

    fn figures(&self) -> Answer<Figures> {
        Ok(Figures { version: "x".repeat(TEXT), ..Figures::default() })
    }

    fn disks(&self) -> Vec<DiskRow> {
        Vec::new()
    }

    fn disk(&self, _: &str) -> Answer<Disk> {
        nothing()
    }

    fn add(&self, _: Object, _: bool) -> Answer<Disk> {
        nothing()
    }

    fn fork(&self, _: &str, _: Fork) -> Answer<Disk> {
        nothing()
    }

    fn remove(&self, _: &str, _: bool, _: bool) -> Answer<Removed> {
        nothing()
    }

    fn set(&self, _: &str, _: Object, _: ChangeQuery) -> Answer<Disk> {
        nothing()
    }

    fn refresh(&self, _: &str) -> Answer<Resized> {
        nothing()
    }

    fn resize(&self, _: &str, _: Resize) -> Answer<Resized> {
        nothing()
    }

    fn flush(&self, _: &str) -> Answer<Flushed> {
        nothing()
    }

    fn drain(&self, _: &str, _: Drain) -> Answer<Drained> {
        nothing()
    }

    fn disconnect(&self, _: &str, _: Disconnect) -> Answer<Departure> {
        nothing()
    }

    fn resume(&self, _: &str) -> Answer<Resumed> {
        nothing()
    }

    fn start(&self, _: &str, _: JobRequest) -> Answer<Job> {
        nothing()
    }

    fn jobs(&self) -> Vec<Job> {
        Vec::new()
    }

    fn cancel(&self, _: u64) -> Answer<Job> {
        nothing()
    }

    fn reload(&self, _: bool) -> Answer<Reload> {
        nothing()
    }

    fn upgrade(&self, _: Option<std::path::PathBuf>) -> Answer<Upgraded> {
        nothing()
    }
}

/// Starts an API on a socket in the abstract namespace, and metrics on a port.
fn start(name: &str, limits: ClientLimits) -> (Api, std::os::unix::net::SocketAddr, SocketAddr) {
    let name = format!("blockyard-{name}-{}", std::process::id());
    let socket = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let access = Access { user: rustix::process::geteuid().as_raw(), group: None };
    let api = Some((UnixListener::bind_addr(&socket).unwrap(), access));
    let listeners = Listeners { api, metrics: Some(tcp) };
    let api = Api::start(listeners, limits, Arc::new(Long::default())).unwrap();
    (api, socket, address)
}

/// Connects to the API. Reads have a limit, so that a test fails instead of waiting for an hour.
fn on_socket(socket: &std::os::unix::net::SocketAddr) -> UnixStream {
    let stream = UnixStream::connect_addr(socket).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// Connects to the metrics' address.
fn on_address(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// Sends a request, and reads nothing.
fn ask<S: Write>(mut stream: S, path: &str) -> S {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

fn read(mut stream: impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_large_text_arrives_whole_on_both_listeners() {
    let (_api, socket, address) = start("whole", UNHURRIED);
    let of_socket = read(ask(on_socket(&socket), "/metrics"));
    let of_address = read(ask(on_address(address), "/metrics"));
    for answer in [of_socket, of_address] {
        let (head, text) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("content-length: {}", text.len())), "{head}");
        assert!(text.len() > TEXT && text.ends_with(" 0\n"), "{}", text.len());
    }
}

#[test]
fn clients_that_read_no_metrics_are_cut_off_and_delay_no_call() {
    // The client that reads must read its text within the limit, also if the machine stops.
    let text = ClientLimits::default().text;
    let (_api, socket, address) = start("stalled", ClientLimits { text, ..UNHURRIED });
    // More than texts may be in memory, on both listeners.
    let stalled: Vec<_> = (0..6).map(|_| ask(on_address(address), "/metrics")).collect();
    let trusted: Vec<_> = (0..6).map(|_| ask(on_socket(&socket), "/v1/figures")).collect();
    for _ in 0..20 {
        let answer = read(ask(on_socket(&socket), "/v1"));
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    // A client that reads gets its text when the server has cut some of the others off.
    let answer = read(ask(on_address(address), "/metrics"));
    assert!(answer.len() > TEXT, "no text for a client that reads: {answer:.200}");
    let incomplete = |mut stream: TcpStream| {
        let mut bytes = Vec::new();
        // The server has reset the connection, or closed it in the middle of the text.
        let _ = stream.read_to_end(&mut bytes);
        bytes.len() < TEXT
    };
    assert!(stalled.into_iter().any(incomplete), "the server kept all texts");
    drop(trusted);
}

/// Sends the begin of a request. The server may have closed the connection for another one.
fn begin(mut stream: impl Write) {
    let _ = stream.write_all(b"GET /v1 HTTP/1.1\r\nhost: ");
}

#[test]
fn connections_without_complete_requests_shut_no_client_out() {
    let (_api, socket, address) = start("crowded", UNHURRIED);
    let (unix, tcp) = (|| on_socket(&socket), || on_address(address));
    let answered = |mut stream: UnixStream| {
        stream.write_all(b"GET /v1 HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        stream
    };
    // Connections with an answer, with the begin of a request, with the begin of a body.
    let answered: Vec<_> = (0..30).map(|_| answered(unix())).collect();
    let begun: Vec<_> = (0..30).map(|_| unix()).collect();
    begun.iter().for_each(begin);
    let bodies: Vec<_> = (0..30).map(|_| unix()).collect();
    for mut body in &bodies {
        let text = b"POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{";
        let _ = body.write_all(text);
    }
    let others: Vec<_> = (0..90).map(|_| tcp()).collect();
    others.iter().for_each(begin);
    // None of these connections ends by itself.
    for _ in 0..90 {
        assert!(read(ask(unix(), "/v1")).starts_with("HTTP/1.1 200"));
        assert!(read(ask(tcp(), "/")).starts_with("HTTP/1.1 200"));
    }
    drop((answered, begun, bodies, others));
}

#[test]
fn the_address_offers_no_call_and_answers_to_no_name_of_another_site() {
    let (_api, _, address) = start("names", UNHURRIED);
    let answer = |request: &str| {
        let mut stream = on_address(address);
        stream.write_all(request.as_bytes()).unwrap();
        read(stream)
    };
    for (request, status) in [
        ("GET /v1/disks HTTP/1.1\r\nhost: localhost", 404),
        ("DELETE /v1/disks/a HTTP/1.1\r\nhost: localhost", 404),
        ("POST /v1/figures HTTP/1.1\r\nhost: localhost", 405),
        ("GET /metrics HTTP/1.1\r\nhost: evil.example", 403),
    ] {
        let answer = answer(&format!("{request}\r\nconnection: close\r\n\r\n"));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {answer}");
        assert!(!answer.to_lowercase().contains("access-control"), "{answer}");
    }
}

#[test]
fn a_paused_api_leaves_its_connections_to_another_process() {
    let name = format!("blockyard-paused-{}", std::process::id());
    let socket = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let ours = UnixListener::bind_addr(&socket).unwrap();
    let theirs = ours.try_clone().unwrap();
    let listeners = Listeners {
        api: Some((ours, Access { user: rustix::process::geteuid().as_raw(), group: None })),
        metrics: None,
    };
    let api = Api::start(listeners, UNHURRIED, Arc::new(Long::default())).unwrap();
    let call = || ask(on_socket(&socket), "/v1");
    for _ in 0..20 {
        assert!(read(call()).starts_with("HTTP/1.1 200"));
        api.acceptance().pause();
        let client = call();
        // If the API had taken the connection, the client would get its answer.
        let (mut accepted, _) = theirs.accept().unwrap();
        accepted.write_all(b"other").unwrap();
        drop(accepted);
        let mut answer = [0; 5];
        (&client).read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"other");
        api.acceptance().resume();
    }
}
