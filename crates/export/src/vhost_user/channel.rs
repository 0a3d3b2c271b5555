//! The back channel: messages from this back end to the front end (VHOST_USER_SET_BACKEND_REQ_FD).
//!
//! The `vhost` crate's `Backend` supports neither configuration changes nor in-band calls. So this
//! module writes these two messages, which carry at most one vring state.
//!
//! What must hold: no wait is longer than [`REPLY_TIME`], whatever the front end does. The front
//! end has sent the socket's open file, so it shares the file's flags and timeouts. So each socket
//! call uses MSG_DONTWAIT, and `poll` waits with a deadline. After a missed deadline, no call waits
//! again until the front end has sent all acknowledgements that it owes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
const CONFIG_CHANGE_MSG: u32 = 2;
const VRING_CALL: u32 = 4;

/// Length of a header and a status in bytes.
const REPLY_LEN: usize = 20;

/// Longest wait until the front end accepts a message and acknowledges it.
const REPLY_TIME: Duration = Duration::from_secs(1);

/// The back channel. It sends one message at a time. Speed does not matter, except for guests that
/// use in-band calls.
#[derive(Debug)]
pub struct BackChannel {
    state: Mutex<State>,
    acknowledged: bool,
    time: Duration,
}

#[derive(Debug)]
struct State {
    /// `None`: the front end has closed the socket, or has accepted only a part of a message.
    socket: Option<OwnedFd>,
    /// Number of acknowledgements that the front end has not sent yet.
    owed: u32,
    /// The acknowledgement that is being received, and the number of its bytes that have arrived.
    reply: [u8; REPLY_LEN],
    got: usize,
}

/// What a back channel is, for the next server.
pub struct Owed {
    pub socket: OwnedFd,
    pub acknowledged: bool,
    /// Number of acknowledgements that the front end has not sent yet.
    pub owed: u32,
    /// Bytes of the next acknowledgement that have arrived.
    pub begun: Vec<u8>,
}

impl BackChannel {
    /// Returns the state of the channel. Returns `None` if the front end has closed it, or if the
    /// process has no free descriptor.
    pub fn owed(&self) -> Option<Owed> {
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        Some(Owed {
            socket: state.socket.as_ref()?.try_clone().ok()?,
            acknowledged: self.acknowledged,
            owed: state.owed,
            begun: state.reply[..state.got].to_vec(),
        })
    }

    /// Continues the channel of another server.
    pub fn continued(owed: Owed) -> Self {
        let channel = BackChannel::new(owed.socket, owed.acknowledged);
        let mut state = channel.state.lock().unwrap_or_else(|e| e.into_inner());
        state.owed = owed.owed;
        state.got = owed.begun.len().min(REPLY_LEN - 1);
        let got = state.got;
        state.reply[..got].copy_from_slice(&owed.begun[..got]);
        drop(state);
        channel
    }

    /// `acknowledged`: the front end acknowledges messages (VHOST_USER_PROTOCOL_F_REPLY_ACK).
    pub fn new(socket: OwnedFd, acknowledged: bool) -> Self {
        let state = State { socket: Some(socket), owed: 0, reply: [0; REPLY_LEN], got: 0 };
        BackChannel { state: Mutex::new(state), acknowledged, time: REPLY_TIME }
    }

    /// Returns whether this is the channel on a socket.
    pub fn is_on(&self, socket: &OwnedFd) -> bool {
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let number = |fd: &OwnedFd| rustix::fs::fstat(fd).ok().map(|s| (s.st_dev, s.st_ino));
        state.socket.as_ref().is_some_and(|own| number(own) == number(socket))
    }

    /// Makes the front end read the configuration space again, because the disk has a new size.
    pub fn config_changed(&self) -> io::Result<()> {
        self.send(CONFIG_CHANGE_MSG, &[])
    }

    /// Sends a call (interrupt) for queue `index`.
    pub fn vring_call(&self, index: u16) {
        let mut state = [0; 8];
        state[..4].copy_from_slice(&u32::from(index).to_ne_bytes());
        // In simulated time (UML's time travel), the front end must acknowledge the message before
        // the simulation continues.
        let _ = self.send(VRING_CALL, &state);
    }

    fn send(&self, request: u32, body: &[u8]) -> io::Result<()> {
        let flags = VERSION | if self.acknowledged { NEED_REPLY } else { 0 };
        let mut message = Vec::with_capacity(12 + body.len());
        for word in [request, flags, body.len() as u32] {
            message.extend(word.to_ne_bytes());
        }
        message.extend(body);
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        let deadline = Instant::now() + self.time;
        let result = state.exchange(&message, self.acknowledged, deadline);
        if result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
            state.socket = None;
        }
        result
    }
}

impl State {
    /// Sends a message and waits for its acknowledgement. Returns `BrokenPipe` if the channel has
    /// failed before.
    fn exchange(
        &mut self,
        message: &[u8],
        acknowledged: bool,
        deadline: Instant,
    ) -> io::Result<()> {
        self.receive()?;
        let is_late = self.owed > 0;
        loop {
            match rustix::net::send(
                self.socket()?,
                message,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Ok(sent) if sent == message.len() => break,
                Ok(_) => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if is_late => {
                    return Err(io::Error::other("the front end does not read the back channel"));
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(e) => return Err(io::Error::new(io::ErrorKind::BrokenPipe, e)),
            }
        }
        if !acknowledged {
            return Ok(());
        }
        self.owed += 1;
        if is_late {
            return Err(io::Error::other("the front end has not acknowledged earlier messages"));
        }
        while self.owed > 0 {
            self.wait(PollFlags::IN, deadline)?;
            self.receive()?;
        }
        if self.reply[12..] == [0; 8] {
            Ok(())
        } else {
            Err(io::Error::other("the front end refused the message"))
        }
    }

    fn socket(&self) -> io::Result<&OwnedFd> {
        self.socket.as_ref().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    /// Receives the acknowledgements that have arrived. Does not read if none is owed.
    fn receive(&mut self) -> io::Result<()> {
        while self.owed > 0 {
            let socket = self.socket.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
            match rustix::net::recv(socket, &mut self.reply[self.got..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::ErrorKind::BrokenPipe.into()),
                Ok((_, got)) => self.got += got,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(e) => return Err(io::Error::new(io::ErrorKind::BrokenPipe, e)),
            }
            if self.got == REPLY_LEN {
                self.got = 0;
                self.owed -= 1;
            }
        }
        Ok(())
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut [PollFd::new(self.socket()?, flags)], Some(&time)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn channel(time: Duration) -> (BackChannel, UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The front end keeps the open file that it sends.
        let kept = ours.try_clone().unwrap();
        (BackChannel { time, ..BackChannel::new(ours.into(), true) }, kept, theirs)
    }

    /// Flags and timeouts of a socket belong to its open file, which the front end shares.
    #[test]
    fn a_front_end_that_changes_flags_and_timeouts_blocks_nothing() {
        let (channel, kept, _theirs) = channel(Duration::from_millis(1));
        kept.set_nonblocking(false).unwrap();
        kept.set_read_timeout(None).unwrap();
        kept.set_write_timeout(None).unwrap();
        assert_eq!(channel.config_changed().unwrap_err().kind(), io::ErrorKind::TimedOut);
        // The front end reads nothing, so after the first timeout no send waits again.
        let sent = (0..100_000).take_while(|_| {
            channel.vring_call(0);
            channel.state.lock().unwrap().owed < 50_000
        });
        assert!(sent.count() > 10);
        assert!(channel.config_changed().is_err());
    }

    #[test]
    fn acknowledgements_are_waited_for_again_after_a_front_end_has_caught_up() {
        let (channel, _kept, mut theirs) = channel(Duration::from_millis(1));
        for _ in 0..3 {
            channel.config_changed().unwrap_err();
        }
        assert_eq!(channel.state.lock().unwrap().owed, 3);
        theirs.write_all(&[0; 3 * REPLY_LEN]).unwrap();
        theirs.read_exact(&mut [0; 36]).unwrap();
        let channel = BackChannel { time: Duration::from_secs(60), ..channel };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                theirs.read_exact(&mut [0; 12]).unwrap();
                // Send an acknowledgement in pieces, with an error as its status.
                theirs.write_all(&[0; 7]).unwrap();
                theirs.write_all(&[1; 13]).unwrap();
                theirs.read_exact(&mut [0; 12]).unwrap();
                theirs.write_all(&[0; REPLY_LEN]).unwrap();
            });
            assert!(channel.config_changed().unwrap_err().to_string().contains("refused"));
            channel.config_changed().unwrap();
        });
        drop(theirs);
        assert_eq!(channel.config_changed().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
