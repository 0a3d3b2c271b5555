//! The events of a server: the latest ones in a ring, and `GET /v1/events`, which streams them.
//!
//! ```text
//!   types    what an event says
//!   stream   the call: server-sent events, with resume
//! ```
//!
//! In: what has happened, from one thread of the server. Out: a text of each event for each client.
//!
//! What must hold: the ring has at most [`CAPACITY`] events. A client that reads slowly delays
//! neither the server nor other clients: it misses events, and gets an event `lost` with their
//! number.

pub(crate) mod stream;
mod types;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::body::Bytes;
use tokio::sync::{Semaphore, watch};

pub use types::{Event, EventsQuery, What};

/// Maximum number of events in the ring.
pub const CAPACITY: usize = 1024;

/// Maximum number of streams at a time.
pub const MAX_STREAMS: usize = 16;

/// Time without an event after which the server sends a comment. So it notices a client that is
/// gone, and a client notices a server that hangs.
pub const QUIET: Duration = Duration::from_secs(15);

/// The latest events of a server; see the module documentation.
pub struct EventLog {
    /// Start of the server in microseconds since 1970. It tells ids of this server from those of
    /// an earlier one.
    server: u64,
    ring: Mutex<Ring>,
    /// Number of the next event, or `u64::MAX` after the last one.
    news: watch::Sender<u64>,
    streams: Arc<Semaphore>,
}

#[derive(Default)]
struct Ring {
    /// The events up to `next`, as they are sent.
    texts: VecDeque<(u64, Bytes)>,
    /// Number of the next event.
    next: u64,
    is_closed: bool,
}

/// What a stream sends next.
#[derive(Debug, PartialEq)]
enum Next {
    Text(Bytes),
    Wait,
    End,
}

/// The place of a stream in the events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the event with this number.
    Before(u64),
    /// The client has an id of another server. The number of events that it has missed is unknown.
    Unknown,
}

/// Error of an id that no server has sent.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no id of an event: use one that the server has sent, or 0")]
struct WrongId(String);

fn micros() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

impl Default for EventLog {
    fn default() -> Self {
        EventLog {
            server: micros(),
            ring: Mutex::default(),
            news: watch::Sender::new(0),
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
        }
    }
}

impl EventLog {
    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event. Does not wait for clients.
    pub fn publish(&self, what: What) {
        let mut ring = self.ring();
        if ring.is_closed {
            return;
        }
        let number = ring.next;
        ring.next += 1;
        ring.texts.push_back((number, self.text(number, what)));
        if ring.texts.len() > CAPACITY {
            ring.texts.pop_front();
        }
        self.news.send_replace(ring.next);
    }

    /// Counts events that the server could not keep. Streams report them as lost.
    pub fn skip(&self, events: u64) {
        let mut ring = self.ring();
        ring.next += events;
        if events > 0 && !ring.is_closed {
            self.news.send_replace(ring.next);
        }
    }

    /// Ends all streams after the last event.
    pub fn close(&self) {
        self.ring().is_closed = true;
        self.news.send_replace(u64::MAX);
    }

    /// Returns the number of streams.
    pub(crate) fn streams(&self) -> usize {
        MAX_STREAMS - self.streams.available_permits()
    }

    fn text(&self, number: u64, what: What) -> Bytes {
        let event = Event { id: format!("{}-{number}", self.server), time_us: micros(), what };
        let json = serde_json::to_value(&event).unwrap_or_default();
        let name = json["event"].as_str().unwrap_or_default();
        Bytes::from(format!("id: {}\nevent: {name}\ndata: {json}\n\n", event.id))
    }

    /// Returns where a stream begins. `id`: of the last event that the client has; 0 stands for the
    /// begin of the ring, and None for its end.
    fn place(&self, id: Option<&str>) -> Result<Place, WrongId> {
        let ring = self.ring();
        let Some(id) = id else { return Ok(Place::Before(ring.next)) };
        if id == "0" {
            return Ok(Place::Before(ring.texts.front().map_or(ring.next, |(first, _)| *first)));
        }
        let is_number = |part: &&str| part.bytes().all(|b| b.is_ascii_digit());
        let parts = id.split_once('-').filter(|(server, number)| {
            is_number(server) && is_number(number) && !server.is_empty()
        });
        let parse = |text: &str| text.parse::<u64>().ok();
        let (server, number) = parts
            .and_then(|(server, number)| Some((parse(server)?, parse(number)?)))
            .ok_or_else(|| WrongId(id.chars().take(64).collect()))?;
        if server == self.server && number < ring.next {
            Ok(Place::Before(number + 1))
        } else {
            Ok(Place::Unknown)
        }
    }

    /// Returns what a stream sends next, and moves its place.
    fn next(&self, place: &mut Place) -> Next {
        let ring = self.ring();
        let first = ring.texts.front().map_or(ring.next, |(first, _)| *first);
        let wanted = match *place {
            Place::Before(number) => number,
            Place::Unknown => {
                *place = Place::Before(first);
                return Next::Text(self.lost(first, None));
            }
        };
        let at = ring.texts.partition_point(|(number, _)| *number < wanted);
        match ring.texts.get(at) {
            Some((number, text)) if *number == wanted => {
                *place = Place::Before(wanted + 1);
                Next::Text(text.clone())
            }
            Some((number, _)) => {
                *place = Place::Before(*number);
                Next::Text(self.lost(*number, Some(number - wanted)))
            }
            None if wanted < ring.next => {
                *place = Place::Before(ring.next);
                Next::Text(self.lost(ring.next, Some(ring.next - wanted)))
            }
            None if ring.is_closed => Next::End,
            None => Next::Wait,
        }
    }

    /// Returns an event that tells a client that it has missed the events before `next`. A client
    /// that resumes after it continues with `next`.
    fn lost(&self, next: u64, count: Option<u64>) -> Bytes {
        let Some(last) = next.checked_sub(1) else {
            // No event comes before: this server is new. The id 0 begins with its first event.
            return self.unnumbered(What::Lost { count });
        };
        self.text(last, What::Lost { count })
    }

    fn unnumbered(&self, what: What) -> Bytes {
        let event = Event { id: "0".into(), time_us: micros(), what };
        let json = serde_json::to_value(&event).unwrap_or_default();
        Bytes::from(format!("id: 0\nevent: lost\ndata: {json}\n\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(events: u64) -> EventLog {
        let log = EventLog::default();
        (0..events).for_each(|disks| log.publish(What::ServerReady { disks }));
        log
    }

    /// Returns the next event of a stream.
    fn read(log: &EventLog, place: &mut Place) -> Event {
        let Next::Text(text) = log.next(place) else { panic!("no event") };
        let text = String::from_utf8(text.to_vec()).unwrap();
        let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        let event: Event = serde_json::from_str(data).unwrap();
        assert!(text.starts_with(&format!("id: {}\nevent: ", event.id)), "{text}");
        event
    }

    #[test]
    fn a_stream_resumes_after_the_last_event_that_the_client_has() {
        let log = log(3);
        let mut place = log.place(Some("0")).unwrap();
        let first = read(&log, &mut place);
        assert_eq!(first.what, What::ServerReady { disks: 0 });
        let mut place = log.place(Some(&first.id)).unwrap();
        assert_eq!(read(&log, &mut place).what, What::ServerReady { disks: 1 });
        let mut end = log.place(None).unwrap();
        assert_eq!(log.next(&mut end), Next::Wait);
        log.publish(What::ServerEnding);
        assert_eq!(read(&log, &mut end).what, What::ServerEnding);
        log.close();
        assert_eq!(log.next(&mut end), Next::End);
        log.publish(What::ServerEnding);
        assert_eq!(log.next(&mut end), Next::End, "nothing follows the end");
    }

    #[test]
    fn a_gap_is_told_with_its_length() {
        let log = log(CAPACITY as u64 + 10);
        let id = format!("{}-3", log.server);
        let mut place = log.place(Some(&id)).unwrap();
        let lost = read(&log, &mut place);
        assert_eq!(lost.what, What::Lost { count: Some(6) });
        assert_eq!(read(&log, &mut place).what, What::ServerReady { disks: 10 });
        let mut again = log.place(Some(&lost.id)).unwrap();
        assert_eq!(read(&log, &mut again).what, What::ServerReady { disks: 10 });
        // Events that the server dropped.
        let mut end = log.place(None).unwrap();
        log.skip(7);
        log.publish(What::ServerEnding);
        assert_eq!(read(&log, &mut end).what, What::Lost { count: Some(7) });
        assert_eq!(read(&log, &mut end).what, What::ServerEnding);
    }

    #[test]
    fn ids_of_other_servers_are_a_gap_and_wrong_ids_are_errors() {
        let log = log(2);
        for id in ["1-1".to_string(), format!("{}-2", log.server), format!("{}-99", log.server)] {
            let mut place = log.place(Some(&id)).unwrap();
            assert_eq!(read(&log, &mut place).what, What::Lost { count: None });
            assert_eq!(read(&log, &mut place).what, What::ServerReady { disks: 0 });
        }
        for wrong in ["", "-", "5", "1-", "-1", "1-+1", "a-1", "1-1-1", "1-99999999999999999999"] {
            assert!(log.place(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
