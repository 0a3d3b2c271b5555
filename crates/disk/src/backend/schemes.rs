//! The names of images that are no paths, and the open of an image by its name.
//!
//! In: a name. Out: its [`Scheme`], or a [`Source`].
//!
//! This table has the names on which no image can lie: a disk in memory, and devices that serve to
//! measure what is above them. [`Source::scheme_of`] also searches the table of crate `storage`, so
//! its callers see one table. What must hold: no other file knows the prefix of such a name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_image::{Chain, ChainOptions, Format, ImageFile, OpenOptions, Opener};
use blockyard_ring::{GuestMemory, Region};
use blockyard_storage::{Scheme, disk_size, scheme_of};

use super::delay::{Below, FORM, Model};
use super::source::{Source, SourceError};

/// A scheme with names that open a disk.
trait DiskScheme: Scheme {
    fn open(&self, name: &str, options: &ChainOptions) -> Result<Source, SourceError>;
}

static SCHEMES: [&dyn DiskScheme; 3] = [&NullScheme, &DelayScheme, &RamScheme];

impl Source {
    /// Returns the scheme of an image's name; None: it is a path.
    pub fn scheme_of(image: &Path) -> Option<(&'static dyn Scheme, &str)> {
        let own = disk_scheme_of(image).map(|(scheme, name)| (scheme as &dyn Scheme, name));
        own.or_else(|| scheme_of(image).map(|(scheme, name)| (scheme as &dyn Scheme, name)))
    }

    /// Opens an image by its path, or by a name that a scheme owns. Without a given format the name
    /// decides; the default is raw.
    pub fn open(options: &ChainOptions) -> Result<Self, SourceError> {
        Source::open_by(&Opener::default(), options)
    }

    /// Like [`Source::open`], with the ring of `opener` if metadata must be read.
    pub fn open_by(opener: &Opener, options: &ChainOptions) -> Result<Self, SourceError> {
        // A storage that the caller gives has no name: the path is that of its disk.
        let scheme = disk_scheme_of(&options.path).filter(|_| options.given.is_none());
        if let Some((scheme, name)) = scheme {
            return scheme.open(name, options);
        }
        match options.format.or_else(|| Format::of_name(&options.path)).unwrap_or(Format::Raw) {
            Format::Raw => Ok(Source::File(Arc::new(ImageFile::open(&raw_options(options))?))),
            format => {
                let options = ChainOptions { format: Some(format), ..options.clone() };
                Ok(Source::Chain(Arc::new(Chain::open_by(opener, &options)?)))
            }
        }
    }
}

fn disk_scheme_of(image: &Path) -> Option<(&'static dyn DiskScheme, &str)> {
    let name = image.to_str()?;
    SCHEMES.iter().find(|scheme| scheme.owns(name)).map(|scheme| (*scheme, name))
}

/// Returns the options with which a raw image is opened.
fn raw_options(options: &ChainOptions) -> OpenOptions {
    let ChainOptions { path, read_only, cache, force_share, nbd, overlaid, journal, given, .. } =
        options.clone();
    OpenOptions {
        given,
        force_share,
        nbd,
        overlaid,
        journal,
        ..OpenOptions::new(path, read_only, cache)
    }
}

/// Returns the size in bytes that follows the prefix of a name.
fn size_of(name: &str, prefix: &str) -> Result<u64, SourceError> {
    let size = disk_size(name.strip_prefix(prefix).unwrap_or_default());
    size.map_err(|error| SourceError::Size { name: name.into(), error })
}

/// `null:`. See [`Source::Null`].
struct NullScheme;

const NULL: &str = "null:";

impl Scheme for NullScheme {
    fn forms(&self) -> &'static str {
        "null:SIZE"
    }

    fn owns(&self, name: &str) -> bool {
        name.starts_with(NULL)
    }

    fn is_for_measurement(&self) -> bool {
        true
    }
}

impl DiskScheme for NullScheme {
    fn open(&self, name: &str, _options: &ChainOptions) -> Result<Source, SourceError> {
        Ok(Source::Null { size: size_of(name, NULL)? })
    }
}

/// `delay:`, a modelled device. See [`Source::Delay`].
struct DelayScheme;

const DELAY: &str = "delay:";

impl Scheme for DelayScheme {
    fn forms(&self) -> &'static str {
        FORM
    }

    fn owns(&self, name: &str) -> bool {
        name.starts_with(DELAY)
    }

    fn is_for_measurement(&self) -> bool {
        true
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        Below::path(name.strip_prefix(DELAY)?)
    }
}

impl DiskScheme for DelayScheme {
    fn open(&self, name: &str, options: &ChainOptions) -> Result<Source, SourceError> {
        let opened = Model::open(name.strip_prefix(DELAY).unwrap_or_default());
        match opened.map_err(|error| SourceError::Delay { name: name.into(), error })? {
            (Below::Nothing { size }, model) => Ok(Source::Delay { size, model, file: None }),
            (Below::File(path), model) => {
                let open = OpenOptions { path, given: None, ..raw_options(options) };
                let file = Arc::new(ImageFile::open(&open)?);
                Ok(Source::Delay { size: file.size(), model, file: Some(file) })
            }
        }
    }
}

/// `ram:`. See [`Source::Ram`].
struct RamScheme;

const RAM: &str = "ram:";

impl Scheme for RamScheme {
    fn forms(&self) -> &'static str {
        "ram:SIZE"
    }

    fn owns(&self, name: &str) -> bool {
        name.starts_with(RAM)
    }

    fn is_volatile(&self) -> bool {
        true
    }
}

impl DiskScheme for RamScheme {
    fn open(&self, name: &str, _options: &ChainOptions) -> Result<Source, SourceError> {
        let region = Region::memfd("blockyard-ram", 0, 0, size_of(name, RAM)?);
        let memory = region.and_then(|(region, _)| GuestMemory::default().with(region));
        let failed = |source| SourceError::Memory { name: name.into(), source };
        Ok(Source::Ram(Arc::new(memory.map_err(failed)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_search_finds_the_schemes_of_disks_and_of_storages() {
        let forms = |name| Source::scheme_of(Path::new(name)).map(|(scheme, _)| scheme.forms());
        let names = ["null:1M", "ram:x", "delay:", "nbd://host", "exec:/p"].map(forms);
        assert_eq!(names[..3], [Some("null:SIZE"), Some("ram:SIZE"), Some(FORM)]);
        assert!(names[3..].iter().all(Option::is_some));
        assert!(["disk.img", "/null:1M", "./ram:1M", "ram"].map(forms).iter().all(Option::is_none));
    }

    #[test]
    fn a_scheme_says_what_becomes_of_its_data_and_which_file_it_needs() {
        let facts = |name| {
            let (scheme, name) = Source::scheme_of(Path::new(name)).unwrap();
            (scheme.is_volatile(), scheme.may_move(), scheme.is_elsewhere(), scheme.file(name))
        };
        assert_eq!(facts("null:1M"), (false, false, false, None));
        assert_eq!(facts("delay:1M,parallel=2"), (false, false, false, None));
        let file = Some("/a.img".into());
        assert_eq!(facts("delay:file=/a.img,parallel=2"), (false, false, false, file));
        assert_eq!(facts("ram:1M"), (true, false, false, None));
        assert_eq!(facts("nbd://host"), (false, true, true, None));
        assert_eq!(facts("exec:/p"), (false, false, true, None));
    }
}
