//! Disconnects clients of a disk, and looks whether they have left.
//!
//! In: one client, or all of them. Out: those that have left. No thread waits for them. What must
//! hold: a device, such as one of ublk, has no connection that could end, so the call does not wait
//! for it.

use std::time::{Duration, Instant};

use blockyard_control::types::{Disconnect, Disconnected};
use blockyard_control::{Answer, Departure, Kind, Problem};
use blockyard_export::Client;
use blockyard_program::output::shell;
use blockyard_yard::DiskState;

use super::words;
use crate::server::Server;

/// Longest wait for clients that are disconnected. NBD clients have 2 s to read their replies.
const DISCONNECT_TIME: Duration = Duration::from_secs(10);

impl Server {
    /// Begins to disconnect one client of a disk, or all of them.
    pub(super) fn disconnect_clients(&self, name: &str, clients: &Disconnect) -> Answer<Departure> {
        let is = match self.info(name)?.state {
            DiskState::Opening => Some("opened"),
            DiskState::Closing => Some("closed"),
            _ => None,
        };
        if let Some(is) = is {
            let what = format!("disk \"{name}\" is being {is}");
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
        let (server, disk) = (self.itself.clone(), name.to_string());
        let mut departing = Departing { leaving, names, until: Instant::now() + DISCONNECT_TIME };
        Ok(Box::new(move || match server.upgrade() {
            Some(server) => departing.look(&server, &disk).transpose(),
            None => Some(Err(Problem::new(Kind::Busy, "the server is ending"))),
        }))
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
        self.yard.clients(name).map_err(words::problem)
    }
}

/// Clients that leave a disk.
struct Departing {
    /// Those that are still connected.
    leaving: Vec<Client>,
    /// All of them.
    names: Vec<String>,
    /// End of the wait.
    until: Instant,
}

impl Departing {
    /// Returns None while clients are connected, and an error after the end of the wait.
    fn look(&mut self, server: &Server, name: &str) -> Answer<Option<Disconnected>> {
        let present = server.present(name)?;
        self.leaving.retain(|client| present.contains(client));
        if self.leaving.is_empty() {
            let clients = std::mem::take(&mut self.names);
            return Ok(Some(Disconnected { name: name.into(), clients }));
        }
        if Instant::now() > self.until {
            let what = format!(
                "{} of disk \"{name}\" is still connected: requests in flight have not ended",
                descriptions(&self.leaving).join(", ")
            );
            return Err(Problem::new(Kind::Conflict, what));
        }
        Ok(None)
    }
}

fn descriptions(clients: &[Client]) -> Vec<String> {
    clients.iter().map(|client| client.description.clone()).collect()
}
