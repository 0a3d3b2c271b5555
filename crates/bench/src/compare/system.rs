//! The compared systems: the server of the disk, its user, and the kind of image.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The user of the disk, host or guest, and its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SystemKind {
    Host,
    UmlUbd,
    UmlUbdSync,
    UmlBlockyard,
    QemuVirtio,
    QemuQsd,
    QemuBlockyard,
    Nbd,
    NbdQsd,
    Ublk,
}

impl SystemKind {
    pub const NAMES: [(&'static str, SystemKind, &'static str); 10] = [
        ("host", SystemKind::Host, "the host's file, without a guest"),
        (
            "uml-ubd",
            SystemKind::UmlUbd,
            "User Mode Linux, its own driver: page cache, flushes dropped",
        ),
        ("uml-ubd-sync", SystemKind::UmlUbdSync, "the same with O_SYNC: each write durable"),
        (
            "uml-blockyard",
            SystemKind::UmlBlockyard,
            "User Mode Linux on Blockyard: O_DIRECT, flushes honoured",
        ),
        (
            "qemu-virtio",
            SystemKind::QemuVirtio,
            "QEMU's own virtio-blk: O_DIRECT, flushes honoured",
        ),
        (
            "qemu-qsd",
            SystemKind::QemuQsd,
            "QEMU on qemu-storage-daemon: O_DIRECT, flushes honoured",
        ),
        (
            "qemu-blockyard",
            SystemKind::QemuBlockyard,
            "QEMU on Blockyard: O_DIRECT, flushes honoured",
        ),
        ("nbd", SystemKind::Nbd, "Blockyard by NBD, on a Unix socket: O_DIRECT, flushes honoured"),
        (
            "nbd-qsd",
            SystemKind::NbdQsd,
            "qemu-storage-daemon by NBD, on a Unix socket: O_DIRECT, flushes honoured",
        ),
        ("ublk", SystemKind::Ublk, "a ublk block device"),
    ];

    fn entry(self) -> &'static (&'static str, SystemKind, &'static str) {
        Self::NAMES.iter().find(|n| n.1 == self).expect("each kind has a name")
    }
}

/// The kind of image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    Raw,
    /// A qcow2 image with all clusters allocated.
    Qcow2,
    /// An empty overlay on a raw image.
    Overlay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    pub kind: SystemKind,
    pub image: Image,
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.entry().0)?;
        f.write_str(match self.image {
            Image::Raw => "",
            Image::Qcow2 => ":qcow2",
            Image::Overlay => ":overlay",
        })
    }
}

/// A text that names no system.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownSystem {
    #[error("\"{0}\" is none of raw, qcow2, overlay")]
    Image(String),
    #[error("\"{0}\" is none of {names}", names = SystemKind::NAMES.map(|n| n.0).join(", "))]
    Kind(String),
    #[error("{0} is measured on raw images only")]
    OnlyRaw(String),
}

impl FromStr for System {
    type Err = UnknownSystem;

    /// Parses the name of a system, such as `uml-blockyard` or `qemu-qsd:overlay`.
    fn from_str(text: &str) -> Result<Self, UnknownSystem> {
        let (name, image) = text.split_once(':').unwrap_or((text, "raw"));
        let image = match image {
            "raw" => Image::Raw,
            "qcow2" => Image::Qcow2,
            "overlay" => Image::Overlay,
            other => return Err(UnknownSystem::Image(other.into())),
        };
        let kind = SystemKind::NAMES.iter().find(|n| n.0 == name).map(|n| n.1);
        let kind = kind.ok_or_else(|| UnknownSystem::Kind(name.into()))?;
        let only_raw =
            matches!(kind, SystemKind::Host | SystemKind::UmlUbd | SystemKind::UmlUbdSync);
        if only_raw && image != Image::Raw {
            return Err(UnknownSystem::OnlyRaw(name.into()));
        }
        Ok(System { kind, image })
    }
}

impl System {
    /// Returns one line about the durability of writes and about the image.
    pub fn about(&self) -> String {
        let image = match self.image {
            Image::Raw => "",
            Image::Qcow2 => "; qcow2, allocated",
            Image::Overlay => "; an empty qcow2 overlay on a raw image",
        };
        format!("{}{image}", self.kind.entry().2)
    }

    /// Returns whether the system answers a guest's flush without a sync. Then a completed flush
    /// does not mean that the data is durable.
    pub fn drops_flushes(&self) -> bool {
        self.kind == SystemKind::UmlUbd
    }

    pub fn uml(&self) -> bool {
        matches!(self.kind, SystemKind::UmlUbd | SystemKind::UmlUbdSync | SystemKind::UmlBlockyard)
    }

    pub fn qemu(&self) -> bool {
        matches!(
            self.kind,
            SystemKind::QemuVirtio | SystemKind::QemuQsd | SystemKind::QemuBlockyard
        )
    }

    pub fn nbd(&self) -> bool {
        matches!(self.kind, SystemKind::Nbd | SystemKind::NbdQsd)
    }

    /// Returns the part of `guests/setup` that the system needs.
    pub fn part(&self) -> Option<&'static str> {
        match self.kind {
            SystemKind::Host | SystemKind::Nbd | SystemKind::Ublk => None,
            SystemKind::NbdQsd => Some("tree"),
            _ if self.uml() => Some("uml"),
            _ => Some("qemu"),
        }
    }

    /// Returns why this system cannot be measured on this machine, or `None` if it can. `guests`:
    /// the folder with the scripts that start guests.
    pub fn missing(&self, guests: Option<&Path>) -> Option<String> {
        if self.kind == SystemKind::Ublk {
            let there = Path::new("/dev/ublk-control").exists();
            return Some(if there {
                "it is measured in guests: `blockyard bench compare --table ublk`".into()
            } else {
                "this kernel has no ublk (/dev/ublk-control)".into()
            });
        }
        let part = self.part()?;
        let Some(guests) = guests else {
            return Some("no guests are installed (BLOCKYARD_GUESTS names their folder)".into());
        };
        let ready = std::process::Command::new("bash")
            .args(["-c", ". \"$1/lib.sh\" && have tree && have \"$2\"", "have"])
            .args([guests.as_os_str(), part.as_ref()])
            .status();
        let ready = ready.is_ok_and(|s| s.success());
        (!ready).then(|| format!("its guest is not set up: run {}/setup {part}", guests.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_system_that_cannot_be_measured_says_what_is_missing() {
        let system = |name: &str| name.parse::<System>().unwrap();
        assert_eq!(system("host").missing(None), None);
        assert_eq!(system("nbd").missing(None), None);
        let why = system("uml-ubd").missing(None).unwrap();
        assert!(why.contains("BLOCKYARD_GUESTS"), "{why}");
        // These guests have QEMU's tree, and no User Mode Linux.
        let guests = Scratch::new();
        guests.file("lib.sh", "have() { [[ $1 == tree || $1 == qemu ]]; }");
        assert_eq!(system("qemu-virtio").missing(Some(&guests)), None);
        assert_eq!(system("nbd-qsd").missing(Some(&guests)), None);
        let why = system("uml-blockyard").missing(Some(&guests)).unwrap();
        assert_eq!(why, format!("its guest is not set up: run {}/setup uml", guests.display()));
        guests.file("lib.sh", "have() { false; }");
        assert!(system("nbd-qsd").missing(Some(&guests)).unwrap().ends_with("setup tree"));
        assert!(system("ublk").missing(Some(&guests)).unwrap().contains("ublk"));
    }

    #[test]
    fn a_system_says_what_its_writes_promise() {
        for (name, _, _) in SystemKind::NAMES {
            let system: System = name.parse().unwrap();
            // Only this driver answers a flush without a sync.
            assert_eq!(system.drops_flushes(), name == "uml-ubd");
            assert_eq!(system.about().contains("flushes dropped"), name == "uml-ubd", "{name}");
            let guest = name.starts_with("uml") || name.starts_with("qemu");
            assert_eq!(system.uml() || system.qemu(), guest, "{name}");
        }
        let about = "nbd:overlay".parse::<System>().unwrap().about();
        assert!(about.ends_with("; an empty qcow2 overlay on a raw image"), "{about}");
    }

    #[test]
    fn names_there_and_back() {
        for name in [
            "host",
            "uml-ubd-sync",
            "nbd:qcow2",
            "nbd-qsd",
            "qemu-blockyard:overlay",
            "uml-blockyard:qcow2",
        ] {
            assert_eq!(name.parse::<System>().unwrap().to_string(), name);
        }
        for bad in ["", "xen", "host:qcow2", "qemu-qsd:vmdk"] {
            assert!(bad.parse::<System>().is_err(), "{bad}");
        }
    }
}
