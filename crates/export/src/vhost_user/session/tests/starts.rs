//! Waits before a ring starts.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::super::starting::pause;
use super::*;
use crate::budget::LONGEST_START_WAIT;

#[test]
fn a_ring_waits_until_earlier_starts_are_paid() {
    let mut front = Front::started();
    let (device, hour) = (front.session().device.clone(), Duration::from_secs(3600));
    // Time pays nothing within the next hour.
    device.count_start(Instant::now() + hour, hour);
    let (sender, waits) = channel();
    front.session().pause = Box::new(move |_, time| sender.send(time).unwrap());
    front.kick_off(Some(event()));
    assert_eq!(waits.try_iter().collect::<Vec<_>>(), [LONGEST_START_WAIT]);
    front.read();
}

#[test]
fn a_signal_to_the_session_ends_the_wait() {
    let (wake, minute) = (event(), Duration::from_secs(60));
    rustix::io::write(&wake, &1u64.to_ne_bytes()).unwrap();
    let began = Instant::now();
    pause(&wake, minute);
    assert!(began.elapsed() < minute);
}
