//! Backups: copies of disks in use, as they are at one moment.
//!
//! In: the path and the format of the copy. Out: the options of a job.

use blockyard_control::types::Backup;
use blockyard_control::{Answer, invalid};
use blockyard_disk::BackupOptions;
use blockyard_image::Format;

use super::places;

/// Returns the options of a backup. Returns an error if the copy cannot be created there.
pub fn options(backup: Backup) -> Answer<BackupOptions> {
    let Backup { target, format } = backup;
    places::check_free("target", &target)?;
    let format = format_of(&target, format.as_deref())?;
    Ok(BackupOptions::new(target, format))
}

/// Returns the format of a copy: the given one, else that of its name, else raw.
fn format_of(target: &str, given: Option<&str>) -> Answer<Format> {
    let format = match given {
        Some(name) => name.parse().map_err(|_| name),
        None => Ok(Format::of_name(target.as_ref()).unwrap_or(Format::Raw)),
    };
    match (format, given) {
        (Ok(format @ (Format::Raw | Format::Qcow2)), _) => Ok(format),
        (Ok(Format::Cow), None) => {
            let what = format!(
                "the name {target} means a cow image, and a backup is raw or qcow2: choose another \
                 name, or set format (--format)"
            );
            Err(invalid("target", &what))
        }
        (Ok(Format::Cow), Some(_)) => {
            let what = "a cow image is an overlay of another image, and a backup has all data \
                        itself: use raw or qcow2";
            Err(invalid("format", what))
        }
        (Err(name), _) => {
            Err(invalid("format", &format!("\"{name}\" is not known: use raw or qcow2")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_given_or_follows_from_the_name() {
        let of = |target: &str, given: Option<&str>| format_of(target, given).map_err(|p| p.field);
        assert_eq!(of("/b/copy", None), Ok(Format::Raw));
        assert_eq!(of("/b/copy.img", None), Ok(Format::Raw));
        assert_eq!(of("/b/copy.qcow2", None), Ok(Format::Qcow2));
        assert_eq!(of("/b/copy.qcow2", Some("raw")), Ok(Format::Raw));
        assert_eq!(of("/b/copy.cow", Some("qcow2")), Ok(Format::Qcow2));
        assert_eq!(of("/b/copy.cow", None), Err(Some("target".into())));
        assert_eq!(of("/b/copy", Some("cow")), Err(Some("format".into())));
        assert_eq!(of("/b/copy", Some("vmdk")), Err(Some("format".into())));
    }
}
