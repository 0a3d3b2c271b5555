//! Disconnects clients of a disk, and looks whether they have left.
//!
//! In: one client, or all of them. Out: those that have left. No thread waits for them. A client of
//! a drained disk cannot leave, so the call refuses it. What must hold: a device, such as one of
//! ublk, has no connection that could end, so the call does not wait for it.

use std::time::{Duration, Instant};

use blockyard_control::types::{Disconnect, Disconnected};
use blockyard_control::{Answer, Departure, Kind, Problem};
use blockyard_export::Client;
use blockyard_program::output::shell;
use blockyard_yard::{DiskInfo, DiskState};

use crate::server::{Server, words};

/// Longest wait for clients that are disconnected. NBD clients have 2 s to read their replies.
const DISCONNECT_TIME: Duration = Duration::from_secs(10);

impl Server {
    /// Begins to disconnect one client of a disk, or all of them.
    pub(super) fn disconnect_clients(&self, name: &str, clients: &Disconnect) -> Answer<Departure> {
        let info = self.info(name)?;
        let is = match info.state {
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
        if info.is_drained && !self.present(name)?.is_empty() {
            let what = format!(
                "disk \"{name}\" is drained, so requests of its clients cannot end: `ctl resume {}` \
                 first",
                shell(name)
            );
            return Err(Problem::new(Kind::Conflict, what));
        }
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
            let why = reason(&server.info(name)?);
            let what = still_connected(name, &descriptions(&self.leaving), why);
            return Err(Problem::new(Kind::Conflict, what));
        }
        Ok(None)
    }
}

/// Returns why clients of a disk do not leave.
fn reason(disk: &DiskInfo) -> &'static str {
    match disk {
        DiskInfo { is_drained: true, .. } => "the disk is drained: `ctl resume` first",
        DiskInfo { paused: 1.., .. } => {
            "requests wait for space on the host: free some, then `ctl resume`"
        }
        _ => "requests in flight have not ended",
    }
}

fn still_connected(disk: &str, clients: &[String], why: &str) -> String {
    let are = if clients.len() == 1 { "is" } else { "are" };
    format!("{} of disk \"{disk}\" {are} still connected: {why}", clients.join(", "))
}

fn descriptions(clients: &[Client]) -> Vec<String> {
    clients.iter().map(|client| client.description.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_stay_are_named_with_the_reason() {
        let disk = DiskInfo::opening("a".into());
        let one = still_connected("a", &["pid 1".into()], reason(&disk));
        let expected = "pid 1 of disk \"a\" is still connected: requests in flight have not ended";
        assert_eq!(one, expected);
        let drained = reason(&DiskInfo { is_drained: true, ..disk.clone() });
        let two = still_connected("a", &["pid 1".into(), "pid 2".into()], drained);
        assert!(two.starts_with("pid 1, pid 2 of disk \"a\" are still connected"), "{two}");
        assert!(two.ends_with("the disk is drained: `ctl resume` first"), "{two}");
        assert!(reason(&DiskInfo { paused: 1, ..disk }).contains("space on the host"));
    }
}
