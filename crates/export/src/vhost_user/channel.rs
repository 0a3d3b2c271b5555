//! The back channel: messages from us to the front end (VHOST_USER_SET_BACKEND_REQ_FD).
//!
//! The `vhost` crate's `Backend` knows neither configuration changes nor in-band calls, so these two messages, which carry
//! at most one vring state, are written here.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
const CONFIG_CHANGE_MSG: u32 = 2;
const VRING_CALL: u32 = 4;

/// The longest wait for the front end's acknowledgement; without one it is taken as not given.
const REPLY_TIME: Duration = Duration::from_secs(1);

/// Writers take turns: this is no way of requests, but for guests that ask for calls in messages.
pub struct BackChannel {
    socket: Mutex<OwnedFd>,
    acknowledged: bool,
}

impl BackChannel {
    /// `acknowledged`: the front end answers messages (VHOST_USER_PROTOCOL_F_REPLY_ACK).
    pub fn new(socket: OwnedFd, acknowledged: bool) -> Self {
        let time = Some(REPLY_TIME);
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, time);
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Send, time);
        BackChannel { socket: Mutex::new(socket), acknowledged }
    }

    /// Tells the front end to read the configuration space anew (a disk was resized).
    pub fn config_changed(&self) -> io::Result<()> {
        self.send(CONFIG_CHANGE_MSG, &[], self.acknowledged)
    }

    /// An interrupt for queue `index`.
    pub fn vring_call(&self, index: u16) {
        let mut state = [0; 8];
        state[..4].copy_from_slice(&u32::from(index).to_ne_bytes());
        // In simulated time (UML's time travel) the front end waits for nothing less than the acknowledged message.
        let _ = self.send(VRING_CALL, &state, self.acknowledged);
    }

    fn send(&self, request: u32, body: &[u8], acknowledged: bool) -> io::Result<()> {
        let flags = VERSION | if acknowledged { NEED_REPLY } else { 0 };
        let mut message = Vec::with_capacity(12 + body.len());
        for word in [request, flags, body.len() as u32] {
            message.extend(word.to_ne_bytes());
        }
        message.extend(body);
        let socket = self.socket.lock().unwrap_or_else(|e| e.into_inner());
        rustix::net::send(&*socket, &message, rustix::net::SendFlags::NOSIGNAL)?;
        if acknowledged {
            let mut reply = [0; 20];
            let (got, _) = rustix::net::recv(&*socket, &mut reply[..], rustix::net::RecvFlags::WAITALL)?;
            if got != reply.len() || reply[12..] != [0; 8] {
                return Err(io::Error::other("the front end refused the message"));
            }
        }
        Ok(())
    }
}
