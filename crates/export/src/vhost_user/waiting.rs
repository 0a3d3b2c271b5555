//! Front ends that connect while another one is served.
//!
//! In: the listening socket. Out: clients in the order of their connections. A disk has one front
//! end at a time. The others wait or are refused (`--second-client`), and the log names each of
//! them. At most [`MOST`] waiting front ends are accepted. Further ones wait in the backlog of the
//! listening socket, and the log does not name them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{SecondClient, Shared, socket};
use crate::Listener;

/// Maximum number of waiting front ends. Each one takes an open descriptor.
const MOST: usize = 8;

/// Time between two looks for the rest of a message.
const PART_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// A connected front end.
pub struct FrontEnd {
    pub stream: UnixStream,
    /// The front end's process, if it is in this process's PID namespace.
    pub process: Option<i32>,
}

impl FrontEnd {
    fn new(stream: UnixStream) -> Self {
        let process = blockyard_ring::host::peer(&stream).and_then(|peer| peer.process);
        FrontEnd { stream, process }
    }

    fn is_gone(&self) -> bool {
        !ready(&self.stream, PollFlags::RDHUP).is_empty()
    }
}

/// The front ends that wait until the served one disconnects.
pub struct Waiting<'a> {
    export: &'a Shared,
    listener: &'a Listener,
    clients: VecDeque<FrontEnd>,
}

impl<'a> Waiting<'a> {
    /// `clients`: front ends that have connected to a previous server.
    pub fn new(export: &'a Shared, listener: &'a Listener, clients: Vec<FrontEnd>) -> Self {
        Waiting { export, listener, clients: clients.into() }
    }

    /// Returns the next client that is connected, if there is one.
    pub fn next(&mut self) -> io::Result<Option<FrontEnd>> {
        if let Some(client) = self.clients.pop_front() {
            return Ok(Some(client));
        }
        let accepted = self.listener.accept_now()?;
        Ok(accepted.map(|stream| FrontEnd::new(stream.into())))
    }

    /// Waits until the served client has sent something, or is gone. Accepts or refuses other
    /// clients during this time.
    ///
    /// A signal on `wake` ends the wait if `is_over`.
    fn until_readable(
        &mut self,
        served: &UnixStream,
        wake: BorrowedFd<'_>,
        process: Option<i32>,
        is_over: &dyn Fn() -> bool,
    ) {
        // Check the served client after each new client, so that many new clients do not delay its
        // messages.
        while ready(served, PollFlags::IN).is_empty() {
            if is_over() {
                return;
            }
            if self.clients.len() >= MOST {
                return wait(served, wake);
            }
            match self.listener.accept_unless(&[served.as_fd(), wake]) {
                Ok(Some(stream)) => self.came(FrontEnd::new(stream.into()), served, process),
                Ok(None) => {}
                // Most likely the process has no free descriptor. Accept again after the next
                // message.
                Err(_) => return wait(served, wake),
            }
        }
    }

    /// Waits for the whole next message of the served client. Returns before if the client is gone
    /// or `is_over`, which is true when the export stops or the session ends.
    pub fn until_whole(
        &mut self,
        served: &UnixStream,
        wake: BorrowedFd<'_>,
        process: Option<i32>,
        is_over: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        self.until_readable(served, wake, process, is_over);
        while !is_over() && ready(served, PollFlags::RDHUP).is_empty() && !socket::is_whole(served)?
        {
            // No event tells of the other part alone: the socket is readable already.
            let mut fds = [
                PollFd::new(served, PollFlags::RDHUP),
                PollFd::from_borrowed_fd(wake, PollFlags::IN),
            ];
            let _ = rustix::event::poll(&mut fds, Some(&PART_TIME));
        }
        Ok(())
    }

    pub fn listener(&self) -> &'a Listener {
        self.listener
    }

    /// Returns the front ends that wait.
    pub fn clients(&self) -> &VecDeque<FrontEnd> {
        &self.clients
    }

    fn came(&mut self, client: FrontEnd, stream: &UnixStream, served: Option<i32>) {
        if !ready(stream, PollFlags::RDHUP).is_empty() {
            // The served front end has disconnected. The new client may be the same front end,
            // which reconnects.
            self.clients.push_back(client);
            return;
        }
        let (device, process) = (&self.export.device, Process(client.process));
        let served = Process(served);
        let name = device.disk.name();
        match self.export.tuning.second_client {
            SecondClient::Wait => {
                let what = format_args!(
                    "a second front end ({process}) connected: it waits until the \
                     first one ({served}) is gone \
                     (--second-client refuse closes its connection instead)"
                );
                device.log.warn(name, None, what);
                self.clients.retain(|client| !client.is_gone());
                self.clients.push_back(client);
            }
            SecondClient::Refuse => {
                let what = format_args!(
                    "a second front end ({process}) is refused: {served} has the disk"
                );
                device.log.warn(name, None, what);
            }
        }
    }
}

/// Describes a process for the log.
struct Process(Option<i32>);

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "pid {pid}"),
            None => f.write_str("a process of another PID namespace"),
        }
    }
}

/// Waits for a message of the served front end, or for a signal on `wake`.
fn wait(served: &UnixStream, wake: BorrowedFd<'_>) {
    let wake = PollFd::from_borrowed_fd(wake, PollFlags::IN);
    let _ = rustix::event::poll(&mut [PollFd::new(served, PollFlags::IN), wake], None);
}

/// Returns the given events for which the socket is ready now, and error or hang-up if there is
/// one.
fn ready(socket: &UnixStream, flags: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(socket, flags)];
    let _ = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    fds[0].revents()
}
