//! Handles the messages that [`super::socket`] parses instead of the `vhost` crate.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockyard_ring::rights;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Result, VhostUserBackendReqHandlerMut};

use super::channel::BackChannel;
use super::refusal::no;
use super::session::Session;
use super::signal::is_unix_stream;
use super::socket::{self, Answer, Message};
use super::state::{Change, Parts};

impl Session {
    /// Handles a message, and returns the answer, if there is one. An error ends the session.
    pub fn answer(
        &mut self,
        request: u32,
        reply: bool,
        message: Message,
    ) -> io::Result<Option<Answer>> {
        if let Message::SkipDrain { index } = message {
            let base = self.stop_without_drain(index).map_err(io::Error::other)?;
            return Ok(Some(Answer::base(index, base)));
        }
        match self.take(message) {
            Ok(Some((layout, file))) => Ok(Some(Answer::inflight(&layout, file.into()))),
            // End the session, because the front end would wait for the answer without a limit.
            Err(e) if socket::has_data_answer(request) => Err(io::Error::other(e)),
            outcome if reply && self.state.acknowledges() => {
                Ok(Some(Answer::acknowledgement(request, outcome.is_ok())))
            }
            _ => Ok(None),
        }
    }

    fn take(&mut self, message: Message) -> Result<Option<(VhostUserInflight, File)>> {
        match message {
            Message::Kick { index } => self.kicked(index)?,
            Message::BackChannel(fd) => self.set_channel(fd.ok_or_else(no)?)?,
            Message::Addresses { index, flags, descriptor, used, available, log } => {
                let parts = Parts { descriptors: descriptor, available, used };
                self.apply(Change::Addresses { index, flags, parts, log })?;
            }
            Message::LogEvent(fd) => self.set_log_event(fd)?,
            // `answer` has handled it, because its answer carries data.
            Message::SkipDrain { .. } => return Err(no()),
            Message::Postcopy(name) => {
                return Err(self.refuse(format_args!(
                    "{name}: postcopy migration is not supported, because a page that has not \
                     arrived yet would block all disks of a reactor; migrate without \
                     postcopy-ram"
                )));
            }
            Message::Enable { index, state } => self.apply(Change::Enable { index, state })?,
            Message::AskInflight(layout) => {
                self.allowed(self.state.negotiated(VhostUserProtocolFeatures::INFLIGHT_SHMFD))?;
                return self.get_inflight_fd(&layout).map(Some);
            }
            Message::Inflight(layout, fd) => {
                self.allowed(self.state.negotiated(VhostUserProtocolFeatures::INFLIGHT_SHMFD))?;
                self.set_inflight_fd(&layout, fd.ok_or_else(no)?.into())?;
            }
        }
        Ok(None)
    }

    /// Handles VHOST_USER_VRING_KICK, an in-band kick. A kick starts a ring that does not run.
    fn kicked(&mut self, index: u32) -> Result<()> {
        if self.running(index as usize).is_none() {
            self.pause_before_start();
        }
        let started = self.start(index as usize);
        self.running(index as usize).ok_or_else(no)?.kick();
        started
    }

    fn set_channel(&mut self, socket: OwnedFd) -> Result<()> {
        if !is_unix_stream(&socket) {
            return Err(self.refuse(format_args!("a back channel that is no Unix stream socket")));
        }
        // The front end owes acknowledgements on the channel, and a server that has died may have
        // handled this message already.
        if self.state.back_channel.as_ref().is_some_and(|channel| channel.is_on(&socket)) {
            return Ok(());
        }
        // Acknowledgements have no descriptors. One that stays in the queue could block the last
        // close of the socket.
        rights::refuse(&socket);
        let channel = Arc::new(BackChannel::new(socket, self.state.acknowledges()));
        *super::lock(&self.export.channel) = Some(channel.clone());
        if let Some(caller) = self.caller.get() {
            caller.use_channel(channel.clone());
        }
        self.state.back_channel = Some(channel);
        Ok(())
    }
}
