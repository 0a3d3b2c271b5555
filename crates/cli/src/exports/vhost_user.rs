//! `--vhost-user`: a socket for the front end of a guest.

use std::path::Path;
use std::sync::Arc;

use blockyard_disk::Disk;
use blockyard_export::vhost_user::{self, Before, HandedSocket, Tuning, VhostUser};
use blockyard_export::{Export, Reactors, keeper};
use blockyard_ring::parcel::Parcel;
use blockyard_yard::{Way, WayError};

use super::{Common, HandedExports, Listens, at, shape};
use crate::options::disk::DiskArgs;

pub(super) struct Kind;

/// A socket that may continue a session of an earlier server.
struct Continued {
    way: Arc<dyn Way>,
    handed: Arc<HandedExports>,
}

impl Way for Continued {
    fn describe(&self) -> String {
        self.way.describe()
    }

    fn start(
        &self,
        disk: &Arc<Disk>,
        reactors: &Arc<Reactors>,
    ) -> Result<Box<dyn Export>, WayError> {
        self.way.start(disk, reactors)
    }

    fn continues_rings(&self, disk: &str) -> bool {
        self.handed.has_such(disk, vhost_user::KIND, HandedSocket::runs_rings)
    }
}

impl super::Kind for Kind {
    fn option(&self) -> &'static str {
        "--vhost-user SOCKET"
    }

    fn is_requested(&self, args: &DiskArgs) -> bool {
        args.vhost_user.is_some()
    }

    fn check(&self, args: &DiskArgs) -> Result<(), &'static str> {
        match args.vhost_user.as_deref() {
            Some("") => Err("the path of its vhost-user socket is empty"),
            Some(path) if path.contains(char::is_control) => {
                Err("the path of its vhost-user socket has a control character: use another path")
            }
            _ => Ok(()),
        }
    }

    fn listens(&self, args: &DiskArgs) -> Option<Listens> {
        args.vhost_user.as_deref().map(Listens::alone)
    }

    fn has_rings(&self) -> bool {
        true
    }

    fn parcels(&self) -> Option<&'static str> {
        Some(vhost_user::KIND)
    }

    fn keeps_session(&self) -> bool {
        true
    }

    fn forget(&self, disk: &str) {
        keeper::forget(&format!("{}:{disk}", vhost_user::KIND));
    }

    fn end_handed(&self, disk: &str, parcel: Parcel, before: Before) -> bool {
        self.forget(disk);
        // Its listener removes the file of its socket.
        drop(HandedSocket::unpack(parcel, before));
        true
    }

    fn way(&self, args: &DiskArgs, common: &Common) -> Option<Arc<dyn Way>> {
        let socket = args.vhost_user.clone()?;
        let tuning = Tuning {
            poll: args.poll,
            in_band: args.in_band_notifications,
            pin_memory: args.pin_memory,
            any_memory_file: args.allow_any_memory_file,
            second_client: args.second_client,
        };
        let (shape, handed) = (shape(args), common.handed.clone());
        let listening = common.clone();
        let all_handed = handed.clone();
        let way = at(socket.clone(), args, move |disk, reactors| {
            if let Some((parcel, before)) = handed.take(disk.name(), vhost_user::KIND) {
                // If the session cannot go on, it may after a correction of the configuration.
                let spare = parcel.try_clone();
                let socket = HandedSocket::unpack_at(parcel, before, Path::new(&socket));
                let resumed = socket.and_then(|socket| {
                    let (disk, reactors) = (disk.clone(), reactors.clone());
                    VhostUser::resume(disk, socket, shape, tuning, reactors)
                });
                if resumed.is_err()
                    && let Ok(spare) = spare
                {
                    handed.put(disk.name(), vhost_user::KIND, spare, before);
                }
                return Ok(Box::new(resumed?));
            }
            let listener = listening.listen(&Listens::alone(&socket))?;
            let reactors = reactors.clone();
            Ok(Box::new(VhostUser::start(disk.clone(), listener, shape, tuning, reactors)?))
        })?;
        Some(Arc::new(Continued { way, handed: all_handed }))
    }
}
