//! Disconnects clients of a disk, and waits until they have left.
//!
//! In: one client, or all of them. Out: those that have left. What must hold: a device, such as one
//! of ublk, has no connection that could end, so the call does not wait for it.

use std::time::{Duration, Instant};

use blockyard_control::types::{Disconnect, Disconnected};
use blockyard_control::{Answer, Kind, Problem};
use blockyard_export::Client;
use blockyard_program::output::shell;
use blockyard_yard::DiskState;

use super::words;
use crate::server::Server;

/// Longest wait for clients that are disconnected. NBD clients have 2 s to read their replies.
const DISCONNECT_TIME: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

impl Server {
    /// Disconnects one client of a disk, or all of them.
    pub(super) fn disconnect_clients(
        &self,
        name: &str,
        clients: &Disconnect,
    ) -> Answer<Disconnected> {
        if self.info(name)?.state == DiskState::Closing {
            let what = format!("disk \"{name}\" is being closed");
            return Err(Problem::new(Kind::Conflict, what));
        }
        let wanted = clients.client.as_deref();
        self.check_client(name, wanted)?;
        let leaving = self.yard.disconnect(name, wanted).map_err(words::problem)?;
        let names = descriptions(&leaving);
        if let Some(wanted) = wanted
            && leaving.is_empty()
            && self.has_client(name, wanted)?
        {
            let what = format!(
                "\"{wanted}\" of disk \"{name}\" is no connection but a device: detach it \
                 (`blockyard detach`, `xl block-detach`)"
            );
            return Err(Problem::new(Kind::Conflict, what).in_field("client"));
        }
        self.wait_until_left(name, leaving)?;
        Ok(Disconnected { name: name.into(), clients: names })
    }

    /// Returns an error if the disk has no such client.
    fn check_client(&self, name: &str, wanted: Option<&str>) -> Answer<()> {
        let Some(wanted) = wanted else { return Ok(()) };
        if self.has_client(name, wanted)? {
            return Ok(());
        }
        let what = format!(
            "disk \"{name}\" has no client \"{wanted}\": `ctl show {}` lists them",
            shell(name)
        );
        Err(Problem::new(Kind::NotFound, what).in_field("client"))
    }

    fn has_client(&self, name: &str, wanted: &str) -> Answer<bool> {
        Ok(self.present(name)?.iter().any(|client| client.description == wanted))
    }

    fn present(&self, name: &str) -> Answer<Vec<Client>> {
        Ok(self.yard.report(name).map_err(words::problem)?.clients)
    }

    fn wait_until_left(&self, name: &str, mut leaving: Vec<Client>) -> Answer<()> {
        let until = Instant::now() + DISCONNECT_TIME;
        loop {
            let present = self.present(name)?;
            leaving.retain(|client| present.contains(client));
            if leaving.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                let what = format!(
                    "{} of disk \"{name}\" is still connected: requests in flight have not ended",
                    descriptions(&leaving).join(", ")
                );
                return Err(Problem::new(Kind::Conflict, what));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

fn descriptions(clients: &[Client]) -> Vec<String> {
    clients.iter().map(|client| client.description.clone()).collect()
}
