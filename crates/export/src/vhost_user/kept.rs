//! What the keeper has of an export.
//!
//! In: the parcel of an export after each message of its front end. Out: the parcels that the
//! keeper gets. What must hold: a message that changes nothing costs the keeper nothing, because a
//! front end can send any number of them. The keeper has no parcel that is older than the last
//! message.

use std::io;

use blockyard_ring::parcel::Parcel;

use crate::packing::Source;

/// A parcel, with the identities of its descriptors.
pub(super) type Sourced = (Parcel, Vec<Source>);

/// What the keeper has, as far as one session knows it.
#[derive(Debug, Default)]
enum Has {
    #[default]
    Unknown,
    Nothing,
    /// The description, and the identities of the descriptors.
    Parcel(Vec<u8>, Vec<Source>),
}

/// What the keeper has, and whether the log says that it has nothing.
#[derive(Debug, Default)]
pub(super) struct Kept {
    has: Has,
    is_reported: bool,
}

impl Kept {
    /// Gives the keeper a parcel, unless it has the same one. `keep` returns false if the keeper
    /// has no room. If there is no parcel, or if it cannot be kept, makes the keeper forget the
    /// last one. Returns the error for the log, once for a session.
    pub fn change(
        &mut self,
        parcel: io::Result<Sourced>,
        keep: impl FnOnce(&Parcel) -> io::Result<bool>,
        forget: impl FnOnce(),
    ) -> Option<io::Error> {
        let kept = parcel.and_then(|(parcel, sources)| {
            let is_same = matches!(&self.has, Has::Parcel(bytes, fds)
                if *bytes == parcel.bytes && *fds == sources);
            if !is_same {
                let has_room = keep(&parcel)?;
                self.has = if has_room { Has::Parcel(parcel.bytes, sources) } else { Has::Unknown };
            }
            Ok(())
        });
        let error = kept.err()?;
        if !matches!(std::mem::replace(&mut self.has, Has::Nothing), Has::Nothing) {
            forget();
        }
        (!std::mem::replace(&mut self.is_reported, true)).then_some(error)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use blockyard_ring::holder::MOST_FDS;

    use super::*;
    use crate::keeper;
    use crate::packing::Packed;

    fn eventfd() -> std::os::fd::OwnedFd {
        rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
    }

    fn parcel<'a>(
        description: &str,
        fds: impl IntoIterator<Item = &'a std::os::fd::OwnedFd>,
    ) -> Sourced {
        let mut packed = Packed::default();
        for fd in fds {
            packed.put(fd).unwrap();
        }
        packed.seal_with_sources(&description).unwrap()
    }

    #[test]
    fn a_parcel_is_sent_only_if_it_differs_from_the_last_one() {
        let (one, two) = (eventfd(), eventfd());
        let (mut kept, sent) = (Kept::default(), Cell::new(0));
        let mut after = |parcel, room| {
            let keep = |_: &Parcel| {
                sent.set(sent.get() + 1);
                Ok(room)
            };
            assert!(kept.change(Ok(parcel), keep, || panic!("nothing to forget")).is_none());
            sent.take()
        };
        assert_eq!([(); 3].map(|()| after(parcel("a", [&one]), true)), [1, 0, 0]);
        // Another eventfd has the same place and the same inode.
        assert_eq!([(); 3].map(|()| after(parcel("a", [&two]), true)), [1, 0, 0]);
        assert_eq!([(); 2].map(|()| after(parcel("b", [&two]), true)), [1, 0]);
        assert_eq!([(); 2].map(|()| after(parcel("a", [&two]), false)), [1, 1], "no room");
        assert_eq!([(); 2].map(|()| after(parcel("a", [&two]), true)), [1, 0]);
    }

    #[test]
    fn a_parcel_that_cannot_be_kept_is_reported_and_forgotten_once() {
        let fd = eventfd();
        let fds = vec![&fd; MOST_FDS];
        let (mut kept, forgotten) = (Kept::default(), Cell::new(0));
        let mut after = |parcel: io::Result<Sourced>| {
            let keep = |parcel: &Parcel| keeper::keep("vhost-user:disk", parcel);
            let error = kept.change(parcel, keep, || forgotten.set(forgotten.get() + 1));
            (error.is_some(), forgotten.take())
        };
        assert_eq!(after(Ok(parcel("few", fds[1..].to_vec()))), (false, 0));
        let flood = [(); 3].map(|()| after(Ok(parcel("many", fds.clone()))));
        assert_eq!(flood, [(true, 1), (false, 0), (false, 0)]);
        assert_eq!(after(Err(io::Error::other("not packed"))), (false, 0));
        assert_eq!(after(Ok(parcel("few", fds[1..].to_vec()))), (false, 0));
        assert_eq!(after(Err(io::Error::other("not packed"))), (false, 1));
    }

    #[test]
    fn the_longest_name_of_a_disk_has_room_in_a_key() {
        let key = format!("{}:{}", super::super::KIND, "n".repeat(255));
        assert!(keeper::keep(&key, &parcel("disk", []).0).is_ok());
    }
}
