//! What two disks of a server cannot both have: a name, a socket, an export name, a device, an
//! image.
//!
//! In: the options of disks. Out: an error that says what is in use, by which disk where that is
//! known. The configuration file and the API have the same checks.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::exports::{self, Claim, Listens};
use crate::options::disk::DiskArgs;
use crate::process::looks::{self, LookError};

/// What tells whether two images are the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ImageId {
    /// Device and inode of a file.
    File(u64, u64),
    /// The normalized name of a storage that is not a file, such as an NBD export. It may have no
    /// lock.
    Storage(String),
}

/// Reason why the server does not know a file of a disk.
#[derive(Debug, thiserror::Error)]
#[error("disk \"{disk}\": {what} {error}")]
pub struct UnseenError {
    pub disk: String,
    /// What the disk uses the file for.
    pub what: &'static str,
    pub error: LookError,
}

impl ImageId {
    /// Returns `None` if no other disk can have the disk's image, or if it does not exist.
    pub fn of(disk: &DiskArgs) -> Option<Self> {
        if let Some((scheme, name)) = blockyard_image::scheme_of(&disk.image) {
            let normalized = scheme.normalize(name).ok().filter(|_| !scheme.is_volatile());
            return normalized.map(ImageId::Storage);
        }
        let metadata = std::fs::metadata(&disk.image).ok()?;
        Some(ImageId::File(metadata.dev(), metadata.ino()))
    }

    /// Like `of`, but waits at most `limit` for the file system. Returns an error after that.
    pub fn within(disk: &DiskArgs, limit: Duration) -> Result<Option<Self>, UnseenError> {
        if blockyard_image::scheme_of(&disk.image).is_some() {
            return Ok(ImageId::of(disk));
        }
        let args = disk.clone();
        looks::look(&disk.image, limit, move || ImageId::of(&args)).map_err(|error| UnseenError {
            disk: disk.name(),
            what: "image",
            error,
        })
    }
}

/// What the disks of a server have.
#[derive(Default)]
pub struct Claims {
    names: HashSet<String>,
    /// The number of disks on each socket. More than one: they share it.
    sockets: HashMap<Listens, usize>,
    /// Other things that only one disk can have, by the option of its export.
    others: HashSet<(&'static str, Claim)>,
    /// The disks of each image, and whether they are read-only.
    images: HashMap<ImageId, Vec<(String, bool)>>,
}

impl Claims {
    /// Records what a disk has. Returns an error and records nothing if another disk has it.
    /// `image`: [`ImageId::of`].
    pub fn add(&mut self, disk: &DiskArgs, image: Option<ImageId>) -> Result<(), String> {
        let name = disk.name();
        if self.names.contains(&name) {
            return Err(format!(
                "two disks are called \"{name}\": set the key name of one of them"
            ));
        }
        let of_disk = |what: String| Err(format!("disk \"{name}\": {what}"));
        let (sockets, others) = (sockets_of(disk), exports::claims(disk));
        if let Some(socket) = sockets.iter().find(|socket| self.is_taken(socket)) {
            return of_disk(format!("another disk has the socket {} already", text_of(socket)));
        }
        if let Some((_, claim)) = others.iter().find(|claim| self.others.contains(claim)) {
            return of_disk(format!("another disk {} already", claim.says));
        }
        let users = image.as_ref().and_then(|image| self.images.get(image)).into_iter().flatten();
        let mut writers = users.filter(|(_, read_only)| !(*read_only && disk.read_only));
        if let Some((other, _)) = writers.next() {
            return of_disk(format!(
                "disk \"{other}\" has the same image, {}: give one disk several exports, or make \
                 both read-only",
                disk.image.display()
            ));
        }
        let texts: Vec<_> = sockets.iter().map(text_of).collect();
        if let Some(at) = (1..texts.len()).find(|at| texts[..*at].contains(&texts[*at])) {
            return of_disk(format!("two of its exports have the socket {}", texts[at]));
        }
        for socket in sockets {
            *self.sockets.entry(socket).or_default() += 1;
        }
        self.others.extend(others);
        if let Some(image) = image {
            self.images.entry(image).or_default().push((name.clone(), disk.read_only));
        }
        self.names.insert(name);
        Ok(())
    }

    /// Returns whether another disk has the socket, and does not share it.
    fn is_taken(&self, socket: &Listens) -> bool {
        let has = |listens: Listens| self.sockets.contains_key(&listens);
        match socket {
            Listens::Alone(path) => has(socket.clone()) || has(Listens::Shared(path.clone())),
            Listens::Shared(path) => has(Listens::Alone(path.clone())),
            Listens::Inherited { name, shared } => {
                has(Listens::Inherited { name: name.clone(), shared: !shared })
                    || (!shared && has(socket.clone()))
            }
        }
    }

    /// Forgets what a disk has. The arguments are those of [`Claims::add`].
    pub fn remove(&mut self, disk: &DiskArgs, image: Option<ImageId>) {
        let name = disk.name();
        for socket in sockets_of(disk) {
            if let Entry::Occupied(mut disks) = self.sockets.entry(socket) {
                *disks.get_mut() -= 1;
                if *disks.get() == 0 {
                    disks.remove();
                }
            }
        }
        for claim in exports::claims(disk) {
            self.others.remove(&claim);
        }
        if let Some((image, users)) =
            image.and_then(|image| self.images.get_mut(&image).map(|users| (image, users)))
        {
            users.retain(|(user, _)| *user != name);
            if users.is_empty() {
                self.images.remove(&image);
            }
        }
        self.names.remove(&name);
    }
}

/// Returns an error if two sockets of a server have the same path: those of its options, or one of
/// them and one of a disk. `own`: the option's name, and the socket.
pub fn check_sockets(own: &[(&str, &str)], disks: &[DiskArgs]) -> Result<(), String> {
    let mut users: HashMap<String, &str> = HashMap::new();
    for (option, socket) in own {
        if let Some(other) = users.insert(own_text(socket), option) {
            return Err(format!("{option} {socket}: {other} is the same socket"));
        }
    }
    for disk in disks {
        for socket in sockets_of(disk).iter().map(text_of) {
            if let Some(option) = users.get(&socket) {
                let name = disk.name();
                return Err(format!("disk \"{name}\": its socket {socket} is that of {option}"));
            }
        }
    }
    Ok(())
}

/// Returns the sockets of a disk, with paths that are equal if the sockets are.
fn sockets_of(disk: &DiskArgs) -> Vec<Listens> {
    let whole = |listens| match listens {
        Listens::Alone(path) => Listens::Alone(whole_path(path)),
        Listens::Shared(path) => Listens::Shared(whole_path(path)),
        inherited @ Listens::Inherited { .. } => inherited,
    };
    exports::listens(disk).into_iter().map(whole).collect()
}

/// Returns a path without `.` in it and from the root on.
fn whole_path(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Returns the text of a socket of the server itself, equal to that of a disk's if the sockets are.
fn own_text(socket: &str) -> String {
    match socket.strip_prefix("fd:") {
        Some(_) => socket.into(),
        None => whole_path(socket.into()).display().to_string(),
    }
}

fn text_of(socket: &Listens) -> String {
    match socket {
        Listens::Alone(path) | Listens::Shared(path) => path.display().to_string(),
        Listens::Inherited { name, .. } => format!("fd:{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_export_of_another_host_has_one_writer() {
        let disk = |name: &str, more: &str| -> DiskArgs {
            toml::from_str(&format!("name = \"{name}\"\nvhost-user = \"/{name}\"\n{more}")).unwrap()
        };
        let mut claims = Claims::default();
        let mut add = |args: &DiskArgs| claims.add(args, ImageId::of(args));
        add(&disk("a", "image = \"nbd://host/x\"\nformat = \"qcow2\"\n")).unwrap();
        let same = disk("b", "image = \"nbd://host:10809/x\"\nformat = \"qcow2\"\n");
        assert!(add(&same).unwrap_err().contains("disk \"a\" has the same image"));
        add(&disk("c", "image = \"nbd://host/y\"\n")).unwrap();
        for name in ["d", "e"] {
            add(&disk(name, "image = \"nbd://host/z\"\nread-only = true\n")).unwrap();
        }
        // Each has memory of its own.
        for name in ["f", "g"] {
            add(&disk(name, "image = \"ram:1M\"\n")).unwrap();
        }
    }
}
