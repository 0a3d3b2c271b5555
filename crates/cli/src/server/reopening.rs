//! Why a disk must not be closed and opened again, as a reload or a change of the cache mode does.
//!
//! In: the disk as it is served, and the options with which it would be opened. What must hold: a
//! disk that could not be opened again, or only with other data, is not closed.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use blockyard_disk::{PathError, Source};
use blockyard_ring::sandbox;
use blockyard_yard::DiskInfo;

use super::error::AddError;
use crate::disks::try_open;
use crate::exports::{self, Listens};
use crate::options::disk::DiskArgs;
use crate::process::{inherited, looks};

/// Why a disk with a job stays open.
pub const JOB: &str = "a job works on it: wait for its end, or cancel it";

/// Returns whether a snapshot has put an overlay on the image with which the disk was opened.
pub fn has_overlay(served: &DiskInfo) -> bool {
    served.top.is_some() && served.top != served.image
}

/// Returns whether an image is the topmost one of the disk, by this path or another one.
pub fn is_top(served: &DiskInfo, image: &Path) -> bool {
    let Some(top) = &served.top else { return false };
    let id = |path: &Path| {
        let file = path.to_path_buf();
        let meta = looks::look(path, looks::LIMIT, move || std::fs::metadata(file).ok());
        meta.ok().flatten().map(|meta| (meta.dev(), meta.ino()))
    };
    top == image || id(image).is_some_and(|image| Some(image) == id(top))
}

/// Logs whether a disk that was closed is served with its old configuration, because it does not
/// open with the new one.
pub fn log_restored(disk: &str, restored: Result<(), AddError>) {
    match restored.map_err(anyhow::Error::from) {
        Ok(()) => tracing::warn!(disk, "the disk is served with its old configuration"),
        Err(e) => tracing::error!(
            disk,
            "the disk cannot be served with its old configuration either: {e:#}"
        ),
    }
}

/// Returns why the disk must stay open. `again`: the options with which it would be opened.
pub fn obstacle(served: &DiskInfo, again: &DiskArgs) -> Option<String> {
    let scheme = Source::scheme_of(&again.image);
    let is_volatile = scheme.is_some_and(|(scheme, _)| scheme.is_volatile());
    if served.image.as_ref() == Some(&again.image) && is_volatile {
        return Some(
            "its data are in memory and would be lost: remove the disk, and add it".into(),
        );
    }
    if has_overlay(served) && !is_top(served, &again.image) {
        let what = "a snapshot has put an overlay on its image, and the disk would open without \
                    it: name the overlay as its image, and its format (qcow2), then `ctl reload`";
        return Some(what.into());
    }
    let program = scheme.and_then(|(scheme, name)| scheme.program(name));
    if program.is_some() && sandbox::is_on() {
        let what = "a server in a sandbox cannot start its program again: restart the server";
        return Some(what.into());
    }
    other_files(served, again).or_else(|| unopenable(again).map(|e| format!("{e:#}")))
}

/// Returns why the images that the disk has by these paths would be other files.
fn other_files(served: &DiskInfo, again: &DiskArgs) -> Option<String> {
    if served.image.as_ref() != Some(&again.image) && !is_top(served, &again.image) {
        return None;
    }
    let paths = served.paths.clone();
    let checked = looks::look(&again.image, looks::LIMIT, move || paths.check());
    match checked {
        Ok(Err(why @ PathError::Replaced(_))) => Some(format!(
            "{why}, and the disk would open with its data: put the old file back, or remove the \
             disk, and add it"
        )),
        // A file that is missing is an error of the open.
        Ok(_) => None,
        Err(e) => Some(format!("image {e}")),
    }
}

/// Returns why a disk cannot be opened, apart from its sockets.
pub fn unopenable(again: &DiskArgs) -> Option<anyhow::Error> {
    let failed = exports::listens(again).iter().find_map(|listens| match listens {
        Listens::Inherited { name, .. } => inherited::check(name).err(),
        Listens::Alone(_) | Listens::Shared(_) => None,
    });
    let failed = failed.or_else(|| match crate::server::sandbox::check(again, looks::LIMIT) {
        Ok(checked) => checked.err(),
        Err(e) => Some(e.into()),
    });
    failed.or_else(|| {
        let disk = again.clone();
        let opened = looks::look(&again.image, looks::LIMIT, move || try_open(&disk));
        opened.map_err(|e| anyhow::anyhow!("image {e}")).flatten().err()
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use blockyard_image::ChainOptions;
    use blockyard_yard::DiskState;

    use super::*;

    #[test]
    fn a_disk_that_would_open_with_other_data_stays_open() {
        let folder =
            std::env::temp_dir().join(format!("blockyard-reopening-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let names = ["base", "top", "other"].map(|name| folder.join(name).display().to_string());
        names.iter().for_each(|name| std::fs::write(name, [0; 4096]).unwrap());
        let [base, top, other] = names.each_ref().map(String::as_str);
        let served = |image: &str, top: &str| DiskInfo {
            state: DiskState::Serving,
            image: Some(image.into()),
            top: Some(top.into()).filter(|top: &PathBuf| !top.as_os_str().is_empty()),
            images: top.into(),
            capacity: 1 << 20,
            ..DiskInfo::opening("a".into())
        };
        let again = |image: &str, socket: &str| {
            let keys =
                format!("image = \"{image}\"\nformat = \"raw\"\nvhost-user = \"{socket}\"\n");
            let keys: toml::Table = keys.parse().unwrap();
            keys.try_into::<DiskArgs>().unwrap()
        };
        let obstacle_of = |image: &str, top: &str, new: &str| {
            obstacle(&served(image, top), &again(new, "/s")).unwrap_or_default()
        };
        assert_eq!(obstacle_of(base, base, base), "");
        assert_eq!(obstacle_of(base, "", base), "");
        assert!(obstacle_of(base, top, base).contains("name the overlay"));
        assert!(obstacle_of(base, top, other).contains("name the overlay"));
        assert_eq!(obstacle_of(base, top, top), "");
        let linked = folder.join("linked").display().to_string();
        std::os::unix::fs::symlink(top, &linked).unwrap();
        assert_eq!(obstacle_of(base, top, &linked), "");
        // The image's name and a blank begin the overlay's name.
        let longer = format!("{base} 2.qcow2");
        std::fs::write(&longer, [0; 4096]).unwrap();
        assert!(obstacle_of(base, &longer, base).contains("name the overlay"));
        assert!(obstacle_of("ram:1M", "", "ram:1M").contains("would be lost"));
        assert_eq!(obstacle_of("ram:1M", "", other), "");
        let not_inherited = obstacle(&served(base, ""), &again(base, "fd:999"));
        assert!(not_inherited.unwrap().contains("did not inherit"));
        // Another file has the path of the open one.
        let source = Source::open(&ChainOptions::new(top)).unwrap();
        let open = DiskInfo { paths: source.paths(), ..served(top, top) };
        assert_eq!(obstacle(&open, &again(top, "/s")), None);
        let moved = folder.join("moved").display().to_string();
        std::fs::rename(top, &moved).unwrap();
        std::fs::copy(other, top).unwrap();
        for image in [top, &linked] {
            let why = obstacle(&open, &again(image, "/s")).unwrap();
            assert!(why.contains("another file is there now"), "{why}");
        }
        // The operator names the open file by its new path.
        assert_eq!(obstacle(&open, &again(&moved, "/s")), None);
        std::fs::remove_file(other).unwrap();
        assert!(obstacle_of(base, "", other).contains("no such file"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
