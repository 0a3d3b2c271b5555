//! What is done with messages that were taken off the socket before the `vhost` crate read them ([`super::socket`]).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures, VhostUserVringAddrFlags};
use vhost::vhost_user::{Result, VhostUserBackendReqHandlerMut};

use super::channel::BackChannel;
use super::config;
use super::notify::is_unix_stream;
use super::session::{Session, no};
use super::socket::{self, Message};

impl Session {
    /// Does what a message asks, and answers it. An error ends the session.
    pub fn answer(&mut self, stream: &UnixStream, request: u32, reply: bool, message: Message) -> io::Result<()> {
        match self.take(message) {
            Ok(Some((layout, file))) => socket::give_inflight(stream, &layout, file.as_fd()),
            // The front end would wait for its answer for ever.
            Err(e) if socket::is_question(request) => Err(io::Error::other(e.to_string())),
            outcome if reply && self.acknowledges() => socket::acknowledge(stream, request, outcome.is_ok()),
            _ => Ok(()),
        }
    }

    fn take(&mut self, message: Message) -> Result<Option<(VhostUserInflight, File)>> {
        match message {
            Message::Kick { index } => self.kicked(index)?,
            Message::BackChannel(fd) => self.set_channel(fd.ok_or_else(no)?)?,
            Message::Addresses { index, flags, descriptor, used, available } => {
                // The ring must not start with the addresses of before.
                self.vring(index)?.parts = None;
                let aligned = descriptor % 16 == 0 && available % 2 == 0 && used % 4 == 0;
                let Some(flags) = VhostUserVringAddrFlags::from_bits(flags).filter(|_| aligned) else {
                    let parts = format_args!("{descriptor:#x}, {available:#x}, {used:#x} (flags {flags:#x})");
                    return Err(self.refuse(format_args!("queue {index}: its parts are not aligned: {parts}")));
                };
                self.set_vring_addr(index, flags, descriptor, used, available, 0)?;
            }
            Message::Enable { index, state } => {
                if self.features & config::F_PROTOCOL == 0 || state > 1 {
                    return Err(self.refuse(format_args!("queue {index}: SET_VRING_ENABLE of {state}")));
                }
                self.set_vring_enable(index, state == 1)?;
            }
            Message::AskInflight(layout) => {
                self.negotiated(VhostUserProtocolFeatures::INFLIGHT_SHMFD)?;
                return self.get_inflight_fd(&layout).map(Some);
            }
            Message::Inflight(layout, fd) => {
                self.negotiated(VhostUserProtocolFeatures::INFLIGHT_SHMFD)?;
                self.set_inflight_fd(&layout, fd.ok_or_else(no)?.into())?;
            }
        }
        Ok(None)
    }

    fn negotiated(&self, feature: VhostUserProtocolFeatures) -> Result<()> {
        if self.protocol.contains(feature) {
            return Ok(());
        }
        Err(self.refuse(format_args!("a message of {feature:?}, which was not negotiated")))
    }

    /// VHOST_USER_VRING_KICK: a kick by message.
    fn kicked(&mut self, index: u32) -> Result<()> {
        let started = self.start(index as usize);
        self.running(index).ok_or_else(no)?.kick();
        started
    }

    fn set_channel(&mut self, socket: OwnedFd) -> Result<()> {
        if !is_unix_stream(&socket) {
            return Err(self.refuse(format_args!("a back channel that is no Unix stream socket")));
        }
        let channel = Arc::new(BackChannel::new(socket, self.acknowledges()));
        *super::lock(&self.export.channel) = Some(channel.clone());
        if let Some(caller) = self.caller.get() {
            caller.use_channel(channel.clone());
        }
        self.channel = Some(channel);
        Ok(())
    }

    fn acknowledges(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }
}
