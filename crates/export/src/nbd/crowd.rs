//! Clients that have not chosen an export yet, by their source.
//!
//! Such a client holds a place of the address without a permission, until its handshake has lasted
//! too long. One source could hold all places for good, because its new clients replace those that
//! were too slow.
//!
//! In: clients that connect, and clients that choose an export or leave. Out: whether a new client
//! is admitted. What must hold:
//! - Clients that connect at the same moment are admitted, whatever their number.
//! - A source is limited to its share only after it has held more for long: twice the share for two
//!   times of a handshake, or four times the share for two thirds of one.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use blockyard_ring::host;

use super::limits::Limits;

/// Each source has at least this share, in clients.
const LEAST_SHARE: usize = 16;
/// A source is limited when its excess is so many times what it may hold during one handshake.
const LIMITED: f64 = 2.0;
/// Its excess never grows beyond this multiple, so that a source is forgiven.
const MOST: f64 = 3.0;

/// Where a client comes from, as far as the server knows it without a permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The user of a process of this host.
    User(u32),
    V4(Ipv4Addr),
    /// A network of IPv6 (/64), because a machine can have all addresses of its network.
    V6([u16; 4]),
    Unknown,
}

impl Source {
    /// Returns the source of the client that has connected to this socket.
    pub fn of(socket: impl AsFd) -> Self {
        if let Some(peer) = host::peer(&socket) {
            return Source::User(peer.user);
        }
        let name = rustix::net::getpeername(socket.as_fd()).ok().flatten();
        let address = name.and_then(|name| SocketAddr::try_from(name).ok());
        address.map_or(Source::Unknown, |address| Source::of_address(address.ip()))
    }

    fn of_address(address: IpAddr) -> Self {
        // A socket of IPv6 shows clients of IPv4 with addresses of IPv6.
        match address.to_canonical() {
            IpAddr::V4(address) => Source::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Source::V6([a, b, c, d])
            }
        }
    }
}

impl Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::User(user) => write!(f, "user {user}"),
            Source::V4(address) => write!(f, "{address}"),
            Source::V6([a, b, c, d]) => write!(f, "{a:x}:{b:x}:{c:x}:{d:x}::/64"),
            Source::Unknown => f.write_str("an unknown source"),
        }
    }
}

/// The clients of one source.
struct Crowd {
    /// Number of its clients that have not chosen an export.
    undecided: usize,
    /// How many places beyond its share these clients have held, times seconds. It shrinks while
    /// they hold less than the share.
    excess: f64,
    /// Time at which `excess` was right.
    since: Instant,
}

/// The sources of an address with clients that have not chosen an export.
#[derive(Default)]
pub struct Crowds(Mutex<HashMap<Source, Crowd>>);

/// Returns how many places of an address the clients of one source may hold at any time.
fn share(limits: &Limits) -> usize {
    (limits.clients / 4).max(LEAST_SHARE)
}

/// Returns the places of the share, times the seconds of a handshake.
fn allowed(limits: &Limits) -> f64 {
    share(limits) as f64 * limits.handshake.as_secs_f64()
}

impl Crowd {
    fn advance(&mut self, limits: &Limits, now: Instant) {
        let passed = now.saturating_duration_since(self.since).as_secs_f64();
        let beyond = self.undecided as f64 - share(limits) as f64;
        self.excess = (self.excess + beyond * passed).clamp(0.0, MOST * allowed(limits));
        self.since = self.since.max(now);
    }
}

impl Crowds {
    fn all(&self) -> MutexGuard<'_, HashMap<Source, Crowd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a client that has connected. Returns false, and does not count it, if its source is
    /// limited.
    pub fn enter(&self, source: Source, limits: &Limits, now: Instant) -> bool {
        let mut all = self.all();
        all.retain(|_, crowd| {
            crowd.advance(limits, now);
            crowd.undecided > 0 || crowd.excess > 0.0
        });
        let crowd = all.entry(source).or_insert(Crowd { undecided: 0, excess: 0.0, since: now });
        let is_limited = crowd.excess >= LIMITED * allowed(limits);
        if is_limited && crowd.undecided >= share(limits) {
            return false;
        }
        crowd.undecided += 1;
        true
    }

    /// Counts a client no more, because it has chosen an export, or has gone.
    pub fn leave(&self, source: Source, limits: &Limits, now: Instant) {
        if let Some(crowd) = self.all().get_mut(&source) {
            crowd.advance(limits, now);
            crowd.undecided = crowd.undecided.saturating_sub(1);
        }
    }

    /// Returns the number of clients that are counted.
    #[cfg(test)]
    pub fn undecided(&self) -> usize {
        self.all().values().map(|crowd| crowd.undecided).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    const ONE: Source = Source::User(1000);
    const OTHER: Source = Source::User(1001);

    /// Lets so many clients of a source connect. Returns the number of those that are admitted.
    fn connect(crowds: &Crowds, source: Source, clients: usize, now: Instant) -> usize {
        let limits = Limits::default();
        (0..clients).filter(|_| crowds.enter(source, &limits, now)).count()
    }

    fn leave(crowds: &Crowds, source: Source, clients: usize, now: Instant) {
        (0..clients).for_each(|_| crowds.leave(source, &Limits::default(), now));
    }

    #[test]
    fn clients_that_connect_at_the_same_moment_are_admitted() {
        let (crowds, start) = (Crowds::default(), Instant::now());
        for round in 0..100 {
            // All of them choose within a second.
            let now = start + Duration::from_secs(round);
            assert_eq!(connect(&crowds, ONE, 256, now), 256);
            leave(&crowds, ONE, 256, now + Duration::from_millis(240));
        }
    }

    #[test]
    fn a_source_that_holds_its_places_for_long_is_limited_to_its_share() {
        let (crowds, start) = (Crowds::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let places = share(&Limits::default());
        assert_eq!(places, 64);
        assert_eq!(connect(&crowds, ONE, 256, at(0)), 256);
        assert_eq!(connect(&crowds, ONE, 1, at(6)), 1);
        assert_eq!(connect(&crowds, ONE, 10, at(7)), 0);
        assert_eq!(connect(&crowds, OTHER, 100, at(7)), 100);
        // Its clients were too slow. The next ones get no more than the share, for some time.
        leave(&crowds, ONE, 257, at(10));
        for seconds in [10, 15] {
            assert_eq!(connect(&crowds, ONE, 300, at(seconds)), places, "{seconds} s");
            leave(&crowds, ONE, places, at(seconds));
        }
        leave(&crowds, OTHER, 100, at(15));
        assert_eq!(connect(&crowds, ONE, 256, at(60)), 256);
        assert_eq!(crowds.all().len(), 1, "the other source is forgotten");
    }

    #[test]
    fn a_client_comes_from_a_user_or_from_a_network() {
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(Source::of(UnixStream::pair().unwrap().0), Source::User(user));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(Source::of(&client), Source::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(Source::of(&listener), Source::Unknown);
        let of = |address: &str| Source::of_address(address.parse().unwrap());
        assert_eq!(of("::ffff:192.0.2.7"), of("192.0.2.7"));
        assert_eq!(of("2001:db8:1:2::7"), of("2001:db8:1:2:ffff::1"));
        assert_ne!(of("2001:db8:1:2::7"), of("2001:db8:1:3::7"));
        assert_eq!(of("2001:db8:1:2::7").to_string(), "2001:db8:1:2::/64");
    }
}
