//! A holder without a process: the test is its server.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::pipe::PipeFlags;

use super::*;
use crate::testing::waits;

/// Returns a holder, and the server's end of its socket.
fn holder() -> (Holder, OwnedFd) {
    let free = Slot { key: [0; MOST_KEY], key_len: 0, fds: [-1; MOST_FDS], count: 0 };
    let (socket, theirs) = pair().unwrap();
    let holder = Holder {
        slots: vec![free; 4],
        failures: 0,
        is_ready: false,
        follows: false,
        refusals: 0,
        is_ending: false,
        has_noted_loss: false,
        closers: Closers::default(),
        restarts: BURST,
        watched: None,
        other: None,
        is_owed: false,
        counted: Instant::now(),
        program: [0; MOST_PATH],
        arguments: vec![std::ptr::null()],
        _words: Vec::new(),
        server: 0,
        is_alone: false,
        socket,
        signals: rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
    };
    (holder, theirs)
}

/// Returns a pipe. Its first end shows whether the holder has the second one.
fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap()
}

fn is_held(reader: &OwnedFd) -> bool {
    rustix::io::read(reader, &mut [0; 1]).is_err()
}

/// Waits until no process has the other end. The child of another test's fork has it until its own
/// end.
fn is_left(fd: &OwnedFd) -> bool {
    let limit = Timespec { tv_sec: waits::LIMIT.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(fd, PollFlags::empty())], Some(&limit)).unwrap() > 0
}

/// Lets the holder wait for its next event, which must come.
fn next_event(holder: &Holder) -> Ends {
    let began = Instant::now();
    let ends = holder.wait(waits::LIMIT.as_millis() as libc::c_int).unwrap();
    assert!(began.elapsed() < waits::LIMIT, "the holder has no event");
    ends
}

/// Starts a process that ends only by a signal.
fn process() -> Child {
    Command::new("sleep").arg("1000").spawn().unwrap()
}

/// Returns the signal that has ended a process.
fn signal_of(process: &mut Child) -> Option<libc::c_int> {
    waits::end(process, "the holder ends it").signal()
}

/// Sends a message of the server with a descriptor, and lets the holder read it.
fn tell(holder: &mut Holder, socket: &OwnedFd, kind: u8, rest: &[u8], fd: Option<OwnedFd>) {
    let message = [&[kind], rest].concat();
    let fds: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
    send(socket.as_raw_fd(), &message, &fds).unwrap();
    drop(fd);
    assert!(holder.take_message());
}

/// Asks for all keys. Returns them with the number of their descriptors.
fn all(holder: &mut Holder, socket: &OwnedFd) -> Vec<(Vec<u8>, usize)> {
    tell(holder, socket, kind::ALL, &[], None);
    let mut found = Vec::new();
    loop {
        let (mut bytes, mut fds) = ([0; MOST_BYTES], [-1; MOST_FDS]);
        let got = receive(socket.as_raw_fd(), &mut bytes, &mut fds).expect("an answer");
        let (len, count) = (got.len, got.count);
        messages::close_all(&fds[..count]);
        match bytes[0] {
            kind::KEEP => found.push((bytes[1..len].to_vec(), count)),
            kind::END => return found,
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_key_has_the_descriptors_of_its_last_message() {
    let (mut holder, socket) = holder();
    let (first, fd) = pipe();
    tell(&mut holder, &socket, kind::KEEP, b"a longer key", Some(fd));
    assert!(is_held(&first));
    let (second, fd) = pipe();
    tell(&mut holder, &socket, kind::KEEP, b"a longer key", Some(fd));
    assert!(is_left(&first) && is_held(&second));
    let (prefix, fd) = pipe();
    tell(&mut holder, &socket, kind::KEEP, b"a", Some(fd));
    assert_eq!(all(&mut holder, &socket), [(b"a longer key".to_vec(), 1), (b"a".to_vec(), 1)]);

    tell(&mut holder, &socket, kind::FORGET, b"a longer key", None);
    assert!(is_left(&second) && is_held(&prefix));
    assert_eq!(holder.place(b"a longer key"), None, "its descriptors must not be closed twice");
    // The shorter key takes the slot of the longer one.
    let (third, fd) = pipe();
    tell(&mut holder, &socket, kind::KEEP, b"b", Some(fd));
    assert!(is_held(&third));
    assert_eq!(all(&mut holder, &socket), [(b"b".to_vec(), 1), (b"a".to_vec(), 1)]);
}

#[test]
fn messages_that_cannot_be_kept_change_nothing_and_leave_no_descriptor() {
    let (mut holder, socket) = holder();
    let longest = [b'k'; MOST_KEY];
    let (kept, fd) = pipe();
    tell(&mut holder, &socket, kind::KEEP, &longest, Some(fd));
    tell(&mut holder, &socket, kind::KEEP, &longest, None);
    assert!(is_held(&kept));
    let expected = vec![(longest.to_vec(), 1)];
    assert_eq!(all(&mut holder, &socket), expected);
    for (kind, rest) in
        [(kind::KEEP, &[b'k'; MOST_KEY + 1][..]), (b'?', b"x"), (kind::SERVER, b"x")]
    {
        let (refused, fd) = pipe();
        tell(&mut holder, &socket, kind, rest, Some(fd));
        assert!(is_left(&refused), "{kind}");
    }
    assert_eq!(all(&mut holder, &socket), expected);
    // All slots are in use.
    let fds: Vec<_> = (0..4).map(|n| (n, pipe())).collect();
    for (n, (reader, fd)) in fds {
        tell(&mut holder, &socket, kind::KEEP, &[n], Some(fd));
        assert!(if n < 3 { is_held(&reader) } else { is_left(&reader) }, "{n}");
    }
}

#[test]
fn a_program_is_a_string_that_fits() {
    let (mut holder, socket) = holder();
    let name = |holder: &Holder| {
        let program = std::ffi::CStr::from_bytes_until_nul(&holder.program).expect("it ends");
        program.to_bytes().to_vec()
    };
    let longest = vec![b'p'; MOST_PATH - 1];
    let message = |path: &[u8]| [&7i32.to_ne_bytes()[..], path].concat();
    tell(&mut holder, &socket, kind::SERVER, &message(&longest), None);
    assert_eq!((name(&holder), holder.server, holder.is_ready), (longest, 7, true));
    tell(&mut holder, &socket, kind::SERVER, &message(b"/short"), None);
    assert_eq!(name(&holder), b"/short");
    for ignored in [&[b'p'; MOST_PATH][..], b""] {
        tell(&mut holder, &socket, kind::SERVER, &message(ignored), None);
        assert_eq!(name(&holder), b"/short");
    }
}

/// Returns the status of waitpid for a process that has exited.
fn exited(status: u8) -> libc::c_int {
    libc::c_int::from(status) << 8
}

#[test]
fn a_server_is_started_again_unless_it_exits_or_fails_too_often() {
    let (mut holder, _socket) = holder();
    for status in [0, 1, 127] {
        assert_eq!(holder.ended(exited(status)), Some(status));
    }
    let killed = libc::SIGKILL;
    for status in [killed, exited(128), exited(255), killed] {
        assert_eq!(holder.ended(status), None);
    }
    // A server that was ready begins the count again. The next one has to become ready itself.
    holder.is_ready = true;
    assert_eq!(holder.ended(killed), None);
    let ends: Vec<_> = (0..FAILURES).map(|_| holder.ended(killed)).collect();
    assert_eq!(ends, [None, None, None, None, Some(1)]);
}

/// Nothing would end a server that is started after the operator's SIGTERM.
#[test]
fn a_server_that_dies_while_it_ends_is_not_started_again() {
    let (mut holder, socket) = holder();
    for (status, expected) in
        [(libc::SIGKILL, 137), (libc::SIGABRT | 0x80, 134), (exited(159), 159)]
    {
        (holder.is_ready, holder.is_ending) = (true, true);
        assert_eq!(holder.follow(status), Some(expected));
        assert!(!holder.is_owed);
    }
    // The new server of an upgrade dies. The old one would serve again.
    let mut old = process();
    for number in [old.id() as i32, std::process::id() as i32] {
        holder.is_ending = false;
        tell(&mut holder, &socket, kind::SERVER, &number.to_ne_bytes(), None);
    }
    holder.is_ending = true;
    assert_eq!(holder.follow(libc::SIGKILL), Some(137));
    assert_eq!(signal_of(&mut old), Some(libc::SIGTERM));
}

/// The configuration has a mistake when the server dies. The sessions wait until it is mended.
#[test]
fn a_server_that_refuses_to_follow_is_tried_again() {
    let (mut holder, socket) = holder();
    holder.follows = true;
    for _ in 0..2 {
        let ends: Vec<_> = (0..=REFUSALS).map(|_| holder.ended(exited(2))).collect();
        assert!(ends[..REFUSALS as usize].iter().all(Option::is_none));
        assert_eq!(ends.last(), Some(&Some(2)));
        // A server that is ready begins the count again.
        let ours = (std::process::id() as i32).to_ne_bytes();
        tell(&mut holder, &socket, kind::SERVER, &ours, None);
        assert_eq!(holder.ended(exited(1)), Some(1), "it was ready");
        holder.is_ready = false;
    }
    assert_eq!(holder.ended(exited(0)), Some(0));
    holder.is_ending = true;
    assert_eq!(holder.ended(exited(1)), Some(1));
}

/// A host without room for a process now has it later. Until then the holder keeps the sessions.
#[test]
fn a_start_that_the_host_refuses_is_tried_again() {
    let (mut holder, socket) = holder();
    let (kept, fd) = pipe();
    tell(&mut holder, &socket, kind::KEEP, b"a", Some(fd));
    let refused = |_: &mut Holder| Err(io::ErrorKind::WouldBlock.into());
    assert_eq!((holder.follow(libc::SIGKILL), holder.is_owed), (None, true));
    for _ in 0..REFUSALS {
        holder.start_again(refused).unwrap();
        assert!(holder.is_owed && is_held(&kept));
        assert_eq!(holder.patience(), AGAIN, "it wakes without an event");
    }
    let started = |holder: &mut Holder| {
        (holder.server, holder.is_owed) = (7, false);
        Ok(())
    };
    holder.start_again(started).unwrap();
    assert_eq!((holder.patience(), holder.server), (FOR_EVER, 7));
    assert!(holder.start_again(refused).is_err(), "the attempts have an end");
}

#[test]
fn a_pause_brings_no_more_restarts_than_a_burst() {
    let (mut holder, _socket) = holder();
    holder.counted -= Duration::from_secs(500);
    holder.pause();
    assert_eq!(holder.restarts, BURST - 1);
}

#[test]
fn a_server_that_dies_is_followed_after_the_end_of_its_taker() {
    let (mut holder, socket) = holder();
    let mut taker = process();
    let number = (taker.id() as i32).to_ne_bytes();
    tell(&mut holder, &socket, kind::TAKER, &number, None);
    assert_eq!(holder.follow(libc::SIGKILL), None);
    assert!(holder.is_owed && holder.server == 0, "no server has been started");
    // It was about to be the server.
    tell(&mut holder, &socket, kind::SERVER, &number, None);
    assert!(holder.other.is_some() && holder.server == 0);
    assert!(next_event(&holder).is_other_gone);
    assert_eq!(signal_of(&mut taker), Some(libc::SIGKILL));
}

#[test]
fn a_taker_that_has_failed_or_become_the_server_is_not_killed() {
    let (mut holder, socket) = holder();
    let ours = (std::process::id() as i32).to_ne_bytes();
    for (kind, number) in [(kind::TAKER, 0i32.to_ne_bytes()), (kind::SERVER, ours)] {
        tell(&mut holder, &socket, kind::TAKER, &ours, None);
        assert!(holder.other.is_some());
        tell(&mut holder, &socket, kind, &number, None);
        assert!(holder.other.is_none());
    }
}

/// The signal came during the upgrade, when the old server was the one to get it.
#[test]
fn a_new_server_is_told_to_end_if_the_holder_is() {
    let (mut holder, socket) = holder();
    let (mut old, mut new) = (process(), process());
    for process in [&old, &new] {
        let number = (process.id() as i32).to_ne_bytes();
        tell(&mut holder, &socket, kind::SERVER, &number, None);
        holder.is_ending = true;
    }
    assert_eq!(signal_of(&mut new), Some(libc::SIGTERM));
    assert!(old.try_wait().unwrap().is_none());
    old.kill().and_then(|()| old.wait()).unwrap();
}

/// The new server dies between its announcement and the end of the old one.
#[test]
fn a_new_server_that_dies_is_followed_by_the_old_one_or_after_its_end() {
    let (mut holder, socket) = holder();
    let mut old = process();
    let mut new = process();
    let tell_of = |holder: &mut Holder, kind, process: &Child| {
        tell(holder, &socket, kind, &(process.id() as i32).to_ne_bytes(), None);
    };
    for (kind, process) in [(kind::SERVER, &old), (kind::TAKER, &new), (kind::SERVER, &new)] {
        tell_of(&mut holder, kind, process);
    }
    assert!(holder.other.as_ref().is_some_and(|other| other.has_served));
    assert_eq!(holder.follow(libc::SIGKILL), None);
    assert!(holder.is_owed && old.try_wait().unwrap().is_none(), "the old one may go on");
    tell_of(&mut holder, kind::SERVER, &old);
    assert_eq!((holder.is_owed, holder.server), (false, old.id() as i32));
    assert!(holder.other.is_none());
    // The old one serves again before the new one has ended, and dies.
    tell_of(&mut holder, kind::SERVER, &new);
    tell_of(&mut holder, kind::SERVER, &old);
    assert_eq!(holder.follow(libc::SIGKILL), None);
    assert_eq!(signal_of(&mut new), Some(libc::SIGKILL));
    assert!(holder.is_owed && next_event(&holder).is_other_gone);
    old.kill().unwrap();
    old.wait().unwrap();
}

/// A holder that polls such a socket would take a processor until the server has ended.
#[test]
fn a_socket_without_a_server_is_left_after_its_last_message() {
    let (mut holder, socket) = holder();
    send(socket.as_raw_fd(), &[&[kind::SERVER][..], &7i32.to_ne_bytes()].concat(), &[]).unwrap();
    assert!(!next_event(&holder).is_left, "the server has its end");
    drop(socket);
    assert!(is_left(&holder.socket) && next_event(&holder).is_left);
    assert!(holder.take_message() && !holder.take_message());
    assert!(holder.is_ready);
    holder.is_alone = true;
    // The only event that is left is that of a signal.
    rustix::io::write(&holder.signals, &1u64.to_ne_bytes()).unwrap();
    assert!(!next_event(&holder).is_left);
}

/// Returns a connection with a last close that lasts for an hour, and its peer.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    let hour = Some(Duration::from_secs(3600));
    rustix::net::sockopt::set_socket_linger(&ours, hour).unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 1 << 16]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    (ours, theirs)
}

#[test]
fn a_socket_that_does_not_close_does_not_stop_the_holder() {
    waits::within("the holder does not wait for a close", discard_sockets_that_do_not_close);
}

/// Never returns if the holder closes the sockets.
fn discard_sockets_that_do_not_close() {
    let (mut holder, socket) = holder();
    let mut peers = Vec::new();
    for round in 0..20_usize {
        let (queue, sender) = UnixStream::pair().unwrap();
        let (ours, theirs) = lingering();
        send(sender.as_raw_fd(), b"x", &[ours.as_raw_fd()]).unwrap();
        drop((ours, sender));
        peers.push(theirs);
        tell(&mut holder, &socket, kind::KEEP, b"disk", Some(queue.into()));
        let closers = &holder.closers;
        assert_eq!(
            (closers.numbers().len(), closers.waiting()),
            (round.min(16), round.max(16) - 16)
        );
    }
    // Each close ends now. The first end makes a place for those that wait.
    drop(peers);
    for most in [16, 1] {
        let numbers = holder.closers.numbers();
        assert_eq!(numbers.len(), most);
        for pid in numbers {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            assert!(waits::has_ended(pid), "a close has not ended");
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
            holder.closers.ended(pid.as_raw_nonzero().get());
        }
    }
    assert!(holder.closers.numbers().is_empty() && holder.closers.waiting() == 0);
    assert!(!holder.has_noted_loss);
    holder.forget(b"disk");
    assert_eq!(holder.closers.numbers().len(), 1);
}
