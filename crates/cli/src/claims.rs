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
        let socket = disk.vhost_user.as_deref().map(path_of);
        if let Some(socket) = socket.as_ref().filter(|s| self.sockets.contains(*s)) {
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
        self.sockets.extend(socket);
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
        let nbd = match &disk.nbd {
            Some(NbdAddress::Unix(path)) => path.to_str(),
            _ => None,
        };
        for socket in disk.vhost_user.as_deref().into_iter().chain(nbd) {
            if let Some(option) = users.get(&path_of(socket)) {
                return Err(format!(
                    "disk \"{}\": its socket {socket} is that of {option}",
                    disk.name()
                ));
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
