//! The process that takes the disks over.

use std::io;
use std::os::unix::net::UnixStream;

use blockyard_disk::Carried;
use blockyard_export::custody::{self, Custody};
use blockyard_export::vhost_user::Before;
use blockyard_image::journal;
use blockyard_storage::targets::exec;

use super::{
    CARRIED, FORMAT, FromNext, FromThis, MESSAGE_TIME, PROGRAM, Peer, check_exports, unexpected,
};
use crate::disk::{Disk, Export};
use crate::error::{Error, ErrorKind};
use crate::yard::Yard;

impl Yard {
    /// Starts a yard with the disks of another process, which calls [`Yard::hand_over`] on the
    /// other end of `from`. Clients notice a pause of milliseconds: vhost-user front ends and NBD
    /// clients stay connected, and ublk devices stay. Statistics go on.
    ///
    /// `disk` describes a disk of that process by its name, as for [`Yard::serve`]. Its exports are
    /// those of before, with the same addresses. None: the disk ends.
    ///
    /// When this returns, the disks are this yard's alone. After an error the other process goes on
    /// with them, and this process must end: it may not serve disks any more.
    ///
    /// A process calls this before it serves any disk.
    pub fn take_over(
        reactors: usize,
        from: UnixStream,
        disk: impl FnMut(&str) -> Option<Disk>,
    ) -> Result<Self, Error> {
        let yard = Yard::start(reactors)?;
        let peer = Peer::new(from, MESSAGE_TIME);
        custody::wait_with_all_disks();
        // If this process dies, the other one may use another folder of journals.
        journal::hold(true);
        match yard.take(&peer, disk) {
            Ok(()) => {
                journal::hold(false);
                // Before requests begin, because a program that is not owned answers none.
                yard.disks().iter().for_each(|disk| yard.yard.own_program(disk));
                exec::end_unused();
                custody::set(Custody::Owner);
                yard.inherited.clear();
                Ok(yard)
            }
            Err(e) => {
                // No connection is shut down, because the other process has the same ones.
                custody::set(Custody::Gone);
                // The other process opens the targets again when it knows that these have ended. If
                // it does not learn that, it waits for the end of this process.
                if yard.close_all(MESSAGE_TIME / 2) {
                    let _ = peer.send(&FromNext::Failed { what: e.to_string() });
                }
                Err(e)
            }
        }
    }

    fn take(&self, peer: &Peer, mut disk: impl FnMut(&str) -> Option<Disk>) -> Result<(), Error> {
        let talking = |e: io::Error| {
            Error::new(ErrorKind::HandOver, format!("talking to the process before: {e}"), e)
        };
        let hello = FromNext::Hello { format: FORMAT, process: std::process::id() };
        let sent = peer.send(&hello);
        // A process that refuses at once may close the connection before it reads.
        let answer = peer.receive().or_else(|e| sent.and(Err(e))).map_err(talking)?;
        let names = match answer {
            FromThis::Welcome { disks, sockets } => {
                for address in sockets {
                    let parcel = peer.receive_parcel().map_err(talking)?;
                    self.inherited.lock().sockets.insert(address, parcel);
                }
                disks
            }
            FromThis::Refused { what } => {
                let refused = format!("the process before keeps its disks: {what}");
                return Err(Error::new(ErrorKind::HandOver, refused, what));
            }
            other => return Err(talking(unexpected(&other))),
        };
        let mut disks: Vec<_> = names.iter().filter_map(|name| disk(name)).collect();
        // NBD clients wait for the end of the hand-over, so they wait for no other disk.
        disks.sort_by_key(|disk| disk.exports.iter().any(Export::is_nbd));
        for disk in disks {
            self.take_one(peer, disk)?;
        }
        peer.send(&FromNext::Ready).map_err(talking)?;
        match peer.receive().map_err(talking)? {
            FromThis::Commit => {}
            other => return Err(talking(unexpected(&other))),
        }
        let Err(e) = peer.send(&FromNext::Serves) else { return Ok(()) };
        // The process before says that it has given up, before it closes the connection.
        match peer.receive::<FromThis>() {
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => {
                tracing::warn!("the process before has ended before it could leave: {e}");
                Ok(())
            }
            _ => Err(talking(e)),
        }
    }

    fn take_one(&self, peer: &Peer, disk: Disk) -> Result<(), Error> {
        let name = disk.name.clone();
        let failed = |e: io::Error| {
            let what = format!("disk \"{name}\": taking it over: {e}");
            Error::new(ErrorKind::HandOver, what, e)
        };
        peer.send(&FromNext::Take { disk: name.clone() }).map_err(failed)?;
        let kinds = match peer.receive().map_err(failed)? {
            FromThis::Given { exports } => exports,
            FromThis::Refused { what } => return Err(failed(io::Error::other(what))),
            other => return Err(failed(unexpected(&other))),
        };
        let mut carried = None;
        for kind in &kinds {
            let parcel = peer.receive_parcel().map_err(failed)?;
            match kind.as_str() {
                CARRIED => {
                    let all = serde_json::from_slice::<Carried>(&parcel.bytes);
                    carried = Some(all.map_err(|e| failed(e.into()))?.into());
                }
                // The open of the image finds it.
                PROGRAM => exec::continue_from(parcel, false).map_err(failed)?,
                _ => self.inherited.put(&name, kind, parcel, Before::Drained),
            }
        }
        check_exports(&disk, kinds.iter().map(String::as_str)).map_err(failed)?;
        self.serve_with(disk, carried)?;
        peer.send(&FromNext::Took { disk: name.clone() }).map_err(failed)
    }
}
