//! The table of schemes, and the open of an image by its name.
//!
//! In: a name. Out: an [`ImageFile`], by the scheme that owns the name, or else by its path.
//!
//! To add a scheme, add a file or a folder with its storage and its [`StorageScheme`], and here a
//! line of [`SCHEMES`]. Crate `disk` has a table for names on which no image can lie (`null:`), and
//! searches both.
//!
//! What must hold: no file except the scheme's own knows its prefix.

use std::path::Path;

use crate::image_file::ImageFile;
use crate::nbd;
use crate::opened::{OpenError, OpenOptions};
use crate::scheme::StorageScheme;
use crate::targets::exec;

/// The kinds of names that are no paths.
pub static SCHEMES: &[&dyn StorageScheme] = &[&nbd::NbdScheme, &exec::ExecScheme];

/// Returns the scheme of a name; None: it is a path.
pub fn scheme_of(name: &Path) -> Option<(&'static dyn StorageScheme, &str)> {
    let name = name.to_str()?;
    SCHEMES.iter().find(|scheme| scheme.owns(name)).map(|scheme| (*scheme, name))
}

impl ImageFile {
    /// Opens and locks an image file, or connects to what its name's scheme describes.
    pub fn open(options: &OpenOptions) -> Result<Self, OpenError> {
        if let Some(opened) = &options.given {
            return Ok(ImageFile::other(opened.clone(), options));
        }
        match scheme_of(&options.path) {
            Some((scheme, name)) => {
                let failed = |error| OpenError::Storage { path: options.path.clone(), error };
                Ok(ImageFile::other(scheme.open(name, options).map_err(failed)?, options))
            }
            None if is_unknown_uri(&options.path) => {
                let forms =
                    SCHEMES.iter().map(|scheme| scheme.forms()).collect::<Vec<_>>().join(", or ");
                Err(OpenError::Scheme { path: options.path.clone(), forms })
            }
            None => ImageFile::open_file(options),
        }
    }
}

/// Returns whether the name looks like a URI, and is not the path of an existing file.
fn is_unknown_uri(path: &Path) -> bool {
    path.to_str().is_some_and(|name| name.contains("://")) && !path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CacheMode;
    use crate::scheme::Scheme;

    #[test]
    fn a_name_selects_the_scheme_that_owns_it() {
        for name in ["nbd://host/a", "nbds://host", "nbd+unix:///?socket=/s", "nbdx://wrong"] {
            let (scheme, text) = scheme_of(Path::new(name)).unwrap();
            assert_eq!((scheme.forms(), text), (nbd::NbdScheme.forms(), name));
        }
        for path in ["disk.qcow2", "/a/nbd", "nbd:x", "./http://host", "a:b"] {
            assert!(scheme_of(Path::new(path)).is_none(), "{path}");
        }
    }

    #[test]
    fn a_scheme_says_what_the_server_must_know_before_an_open() {
        let short = |name| nbd::NbdScheme.short_name(name);
        assert_eq!(short("nbd://host/web").as_deref(), Some("web"));
        assert_eq!(short("nbd://host").as_deref(), Some("nbd"));
        assert_eq!(short("nbd://host:port/web"), None, "the name is wrong");
        let folder = |name| nbd::NbdScheme.folder(name);
        assert_eq!(folder("nbds://host/web?tls-certificates=/c"), Some("/c".into()));
        assert_eq!(folder("nbd://host/web"), None);
        assert_eq!(exec::ExecScheme.short_name("exec:/p"), None, "that of its file");
    }

    #[test]
    fn an_allowance_completes_the_names_that_it_permits() {
        let scheme = nbd::NbdScheme;
        let permit = |allowed, name| scheme.permit(allowed, name);
        assert_eq!(permit("nbd://host", "nbd://host:10809/a").as_deref(), Some("nbd://host/a"));
        assert_eq!(
            permit("nbds://host?tls-certificates=/c", "nbds://host/a").as_deref(),
            Some("nbds://host/a?tls-certificates=/c")
        );
        for (allowed, name) in [
            ("nbd://host", "nbd://other/a"),
            ("nbd://host/a", "nbd://host/b"),
            ("/folder", "nbd://host/a"),
        ] {
            assert_eq!(permit(allowed, name), None, "{allowed} {name}");
        }
        assert_eq!(
            scheme.normalize("nbd://host:10809/a").unwrap(),
            scheme.normalize("nbd://host/a").unwrap()
        );
    }

    #[test]
    fn the_error_for_an_unknown_scheme_lists_the_known_ones() {
        let options = OpenOptions::new("http://host/disk.img", false, CacheMode::Writeback);
        let error = ImageFile::open(&options).unwrap_err().to_string();
        assert!(error.starts_with("image http://host/disk.img: there is no such file"), "{error}");
        for scheme in SCHEMES {
            assert!(error.contains(scheme.forms()), "{error}");
        }
    }
}
