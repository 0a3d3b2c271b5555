//! Front ends that connect while another one is served.
//!
//! In: the listening socket. Out: clients, in the order in which they came. A disk has one front
//! end at a time: the others wait or are refused (`--second-client`), and the log names each of
//! them. At most [`MOST`] of them are accepted while they wait; those that come then wait in the
//! listening socket's backlog, unnamed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{SecondClient, Shared};
use crate::Listener;

/// Clients that wait with a descriptor each.
const MOST: usize = 8;

pub struct Client {
    pub stream: UnixStream,
    /// Its process, where it is known here.
    pub process: Option<i32>,
}

impl Client {
    fn new(stream: UnixStream) -> Self {
        let process = blockyard_ring::host::peer_process(&stream);
        Client { stream, process }
    }

    fn is_gone(&self) -> bool {
        !ready(&self.stream, PollFlags::RDHUP).is_empty()
    }
}

pub struct Waiting<'a> {
    export: &'a Shared,
    listener: &'a Listener,
    clients: VecDeque<Client>,
}

impl<'a> Waiting<'a> {
    pub fn new(export: &'a Shared, listener: &'a Listener) -> Self {
        Waiting { export, listener, clients: VecDeque::new() }
    }

    /// Waits for the next client. None: the export is to stop, or there is none after all.
    pub fn next(&mut self) -> io::Result<Option<Client>> {
        if let Some(client) = self.clients.pop_front() {
            return Ok(Some(client));
        }
        let accepted = self.listener.accept(self.export.wake.as_fd())?;
        Ok(accepted.map(|stream| Client::new(stream.into())))
    }

    /// Waits until the client that is served has sent something, or is gone. Meanwhile it takes
    /// care of those that connect.
    pub fn until_readable(&mut self, served: &UnixStream, process: Option<i32>) {
        // One new client a message: however many come, the messages are read.
        while self.clients.len() < MOST && ready(served, PollFlags::IN).is_empty() {
            if self.export.stop.load(Ordering::SeqCst) {
                return;
            }
            match self.listener.accept(served.as_fd()) {
                Ok(Some(stream)) => self.came(Client::new(stream.into()), served, process),
                Ok(None) => {}
                // Most likely no descriptor is left. The next message asks again.
                Err(_) => return,
            }
        }
    }

    fn came(&mut self, client: Client, stream: &UnixStream, served: Option<i32>) {
        if !ready(stream, PollFlags::RDHUP).is_empty() {
            // The first one has gone, and this one may be the same front end again.
            self.clients.push_back(client);
            return;
        }
        let (device, process) = (&self.export.device, Process(client.process));
        let served = Process(served);
        let name = device.disk.name();
        match self.export.tuning.second_client {
            SecondClient::Wait => {
                let what = format_args!(
                    "a second front end ({process}) connected: it waits until the first one ({served}) is gone \
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

/// A process, for the log.
struct Process(Option<i32>);

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "pid {pid}"),
            None => f.write_str("a process of another PID namespace"),
        }
    }
}

/// Which of these a socket is ready for, now; also its errors and its end.
fn ready(socket: &UnixStream, flags: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(socket, flags)];
    let _ = rustix::event::poll(&mut fds, Some(&Timespec::default()));
    fds[0].revents()
}
