//! What two disks of a server cannot both have: a name, a socket, an export name, a device, an
//! image.
//!
//! In: the options of disks. Out: an error that says what is in use, by which disk where that is
//! known. The configuration file and the API have the same checks.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use crate::options::disk::DiskArgs;
use crate::options::nbd::NbdAddress;
use crate::options::values::UblkNumber;
use crate::options::xen::XenDevice;

/// Device and inode of an image that is a file.
pub type FileNumber = (u64, u64);

/// What the disks of a server have.
#[derive(Default)]
pub struct Claims {
    names: HashSet<String>,
    sockets: HashSet<PathBuf>,
    /// NBD's Unix sockets, and the number of disks on each.
    nbd_sockets: HashMap<PathBuf, usize>,
    exports: HashSet<(String, String)>,
    devices: HashSet<u32>,
    domains: HashSet<XenDevice>,
    /// The disks of each image, and whether they are read-only.
    images: HashMap<FileNumber, Vec<(String, bool)>>,
}

impl Claims {
    /// Records what a disk has. Returns an error and records nothing if another disk has it.
    /// `file`: [`DiskArgs::file`].
    pub fn add(&mut self, disk: &DiskArgs, file: Option<FileNumber>) -> Result<(), String> {
        let name = disk.name();
        if self.names.contains(&name) {
            return Err(format!(
                "two disks are called \"{name}\": set the key name of one of them"
            ));
        }
        let of_disk = |what: String| Err(format!("disk \"{name}\": {what}"));
        let (socket, nbd_socket) = (disk.vhost_user.as_deref().map(path_of), nbd_socket_of(disk));
        let is_taken = |socket: &PathBuf| self.sockets.contains(socket);
        let is_nbds = |socket: &PathBuf| self.nbd_sockets.contains_key(socket);
        let taken = socket.as_ref().filter(|socket| is_taken(socket) || is_nbds(socket));
        let taken = taken.or_else(|| nbd_socket.as_ref().filter(|socket| is_taken(socket)));
        if let Some(socket) = taken {
            return of_disk(format!("another disk has the socket {} already", socket.display()));
        }
        let export = export_of(disk);
        if let Some((address, _)) = export.as_ref().filter(|export| self.exports.contains(export)) {
            return of_disk(format!("another disk has that name at {address} already"));
        }
        let device = device_of(disk);
        if let Some(number) = device.filter(|number| self.devices.contains(number)) {
            return of_disk(format!("another disk is /dev/ublkb{number} already"));
        }
        if let Some(device) = disk.xen.filter(|device| self.domains.contains(device)) {
            return of_disk(format!("another disk is {device} already"));
        }
        let users = file.and_then(|file| self.images.get(&file)).into_iter().flatten();
        let mut writers = users.filter(|(_, read_only)| !(*read_only && disk.read_only));
        if let Some((other, _)) = writers.next() {
            return of_disk(format!(
                "disk \"{other}\" has the same image, {}: give one disk several exports, or make \
                 both read-only",
                disk.image.display()
            ));
        }
        if socket.is_some() && socket == nbd_socket {
            return of_disk("its vhost-user socket is its NBD socket".into());
        }
        self.sockets.extend(socket);
        if let Some(socket) = nbd_socket {
            *self.nbd_sockets.entry(socket).or_default() += 1;
        }
        self.exports.extend(export);
        self.devices.extend(device);
        self.domains.extend(disk.xen);
        if let Some(file) = file {
            self.images.entry(file).or_default().push((name.clone(), disk.read_only));
        }
        self.names.insert(name);
        Ok(())
    }

    /// Forgets what a disk has. The arguments are those of [`Claims::add`].
    pub fn remove(&mut self, disk: &DiskArgs, file: Option<FileNumber>) {
        let name = disk.name();
        if let Some(socket) = &disk.vhost_user {
            self.sockets.remove(&path_of(socket));
        }
        if let Some(socket) = nbd_socket_of(disk)
            && let Some(disks) = self.nbd_sockets.get_mut(&socket)
        {
            *disks -= 1;
            if *disks == 0 {
                self.nbd_sockets.remove(&socket);
            }
        }
        if let Some(export) = export_of(disk) {
            self.exports.remove(&export);
        }
        if let Some(number) = device_of(disk) {
            self.devices.remove(&number);
        }
        if let Some(device) = &disk.xen {
            self.domains.remove(device);
        }
        if let Some((file, users)) =
            file.and_then(|file| self.images.get_mut(&file).map(|users| (file, users)))
        {
            users.retain(|(user, _)| *user != name);
            if users.is_empty() {
                self.images.remove(&file);
            }
        }
        self.names.remove(&name);
    }
}

/// Returns an error if two sockets of a server have the same path: those of its options, or one of
/// them and one of a disk. `own`: the option's name, and the socket.
pub fn check_sockets(own: &[(&str, &str)], disks: &[DiskArgs]) -> Result<(), String> {
    let mut users: HashMap<PathBuf, &str> = HashMap::new();
    for (option, socket) in own {
        if let Some(other) = users.insert(path_of(socket), option) {
            return Err(format!("{option} {socket}: {other} is the same socket"));
        }
    }
    for disk in disks {
        let vhost_user = disk.vhost_user.as_deref().map(path_of);
        for socket in vhost_user.into_iter().chain(nbd_socket_of(disk)) {
            if let Some(option) = users.get(&socket) {
                let (name, socket) = (disk.name(), socket.display());
                return Err(format!("disk \"{name}\": its socket {socket} is that of {option}"));
            }
        }
    }
    Ok(())
}

/// Returns the path of a socket, without `.` in it and from the root on, so that equal sockets
/// compare equal. (`fd:NAME` is no path, and stays unique too.)
fn path_of(socket: &str) -> PathBuf {
    std::path::absolute(socket).unwrap_or_else(|_| socket.into())
}

/// Returns the path of the disk's NBD socket.
fn nbd_socket_of(disk: &DiskArgs) -> Option<PathBuf> {
    match &disk.nbd {
        Some(NbdAddress::Unix(path)) => {
            Some(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
        }
        _ => None,
    }
}

/// Returns the address and the name of the NBD export.
fn export_of(disk: &DiskArgs) -> Option<(String, String)> {
    let name = || disk.nbd_name.clone().unwrap_or_else(|| disk.name());
    disk.nbd.as_ref().map(|address| (address.to_string(), name()))
}

/// Returns the configured number of the ublk device.
fn device_of(disk: &DiskArgs) -> Option<u32> {
    match disk.ublk {
        Some(UblkNumber::Number(number)) => Some(number),
        _ => None,
    }
}
