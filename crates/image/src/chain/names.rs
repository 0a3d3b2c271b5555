//! The backing and data files that images name, and which of them may be opened.
//!
//! Invariants: no file outside the operator's folders is opened, whatever an image names; no image
//! is in a chain twice.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_storage::{FileId, StorageScheme, path_of, scheme_of};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::error::{Cause, ChainError, Role};
use super::options::ChainOptions;
use crate::layers::format::Format;

/// Maximum number of images in a chain.
pub const MAX_DEPTH: usize = 200;

/// Returns whether `name` is the path of a file if an image stores it. QEMU takes the word before a
/// colon for a protocol (`fat:folder`), unless the word contains a slash: `./a:b` is a path.
pub fn names_a_path(name: &str) -> bool {
    name.split_once(':').is_none_or(|(word, _)| word.is_empty() || word.contains('/'))
}

/// Identity of an image, to detect cycles in a chain.
#[derive(PartialEq)]
pub(super) enum Identity {
    File(FileId),
    /// Normalized name of an image that a scheme opens (NBD).
    Other(String),
}

/// An image to be opened.
pub(super) struct PendingImage {
    pub(super) path: PathBuf,
    pub(super) format: Option<Format>,
    /// The image that names this one.
    pub(super) named_by: Option<NamedBy>,
    /// Descriptor (O_PATH) of the file at `path`. Checks and opens use only this descriptor,
    /// because a symbolic link may change at any time.
    pub(super) found: Option<Arc<OwnedFd>>,
}

/// The image that names a file, and how.
#[derive(Clone)]
pub(super) struct NamedBy {
    path: PathBuf,
    role: Role,
    name: String,
}

impl PendingImage {
    /// Returns the file that this image names; a relative name begins at its folder.
    pub(super) fn names(&self, role: Role, name: &str, format: Option<Format>) -> PendingImage {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let path =
            if scheme_of(Path::new(name)).is_some() { name.into() } else { folder.join(name) };
        let named_by = Some(NamedBy { path: self.path.clone(), role, name: name.into() });
        PendingImage { path, format, named_by, found: None }
    }

    /// Returns an error about the image that names this one, with the name that it uses.
    pub(super) fn refuse(&self, what: impl Into<String>) -> ChainError {
        self.refusal(what.into(), None)
    }

    /// Like [`PendingImage::refuse`], because of an error.
    pub(super) fn refuse_for(&self, cause: impl Into<Cause>) -> ChainError {
        let cause = cause.into();
        self.refusal(cause.to_string(), Some(cause))
    }

    fn refusal(&self, what: String, cause: Option<Cause>) -> ChainError {
        match self.named_by.clone() {
            Some(NamedBy { path, role, name }) => {
                ChainError::Named { path, role, name, what, cause }
            }
            None => ChainError::Name { path: self.path.clone(), what, cause },
        }
    }

    /// Returns the scheme that opens this image, and the image's name in that scheme. None: the
    /// image is a file of this host.
    pub(super) fn scheme(&self) -> Option<(&'static dyn StorageScheme, &str)> {
        scheme_of(&self.path)
    }

    /// Replaces a name from an image by the operator's name for it, which may for instance add
    /// certificates.
    pub(super) fn permitted(mut self, allowed: &Allowed) -> PendingImage {
        if self.named_by.is_some()
            && let Some(name) = self.path.to_str().and_then(|name| allowed.permit(name))
        {
            self.path = name.into();
        }
        self
    }

    /// Checks the chain's depth and that the image is not in the chain already. Adds it to `seen`.
    pub(super) fn may_be_opened(
        &self,
        depth: usize,
        seen: &mut Vec<Identity>,
    ) -> Result<(), ChainError> {
        if depth >= MAX_DEPTH {
            return Err(self.refuse(format!("the chain is longer than {MAX_DEPTH} images")));
        }
        let me = match (self.scheme(), &self.found) {
            (Some((scheme, name)), _) => {
                Identity::Other(scheme.normalize(name).map_err(|e| self.refuse_for(e))?)
            }
            // A file that cannot be examined cannot be opened either; the open reports the error.
            (None, found) => {
                match found.as_ref().map_or_else(|| FileId::of_path(&self.path), FileId::of_fd) {
                    Ok(id) => Identity::File(id),
                    Err(_) => return Ok(()),
                }
            }
        };
        if seen.contains(&me) {
            return Err(self.refuse("it is in the chain already: the chain is a circle"));
        }
        seen.push(me);
        Ok(())
    }

    /// Opens (O_PATH) the file that an image names, and refuses one outside the allowed folders.
    /// The caller must open the image through this descriptor, because the path may lead to another
    /// file later.
    pub(super) fn find(mut self, allowed: &Allowed) -> Result<PendingImage, ChainError> {
        let Some(named_by) = self.named_by.clone() else { return Ok(self) };
        if self.found.is_some() || self.is_permitted(allowed)? {
            return Ok(self);
        }
        let advice = match named_by.role {
            Role::Backing => "restore it, or name its new place (blockyard image rebase --unsafe)",
            Role::Data => "restore it",
        };
        let missing = |e: Errno| match e {
            Errno::NOENT => self.refuse(format!("{} is missing: {advice}", self.path.display())),
            _ => self.refuse(format!("{}: {e}", self.path.display())),
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let found = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(missing)?;
        let real = rustix::fs::readlink(path_of(&found), Vec::new()).map_err(missing)?;
        let real = Path::new(OsStr::from_bytes(real.to_bytes()));
        if !allowed.folders.iter().any(|folder| real.starts_with(folder)) {
            let list: Vec<_> = allowed.folders.iter().map(|f| f.display().to_string()).collect();
            let NamedBy { path, role, name } = named_by;
            let (real, allowed) = (real.into(), list.join(", "));
            return Err(ChainError::Outside { path, role, name, real, allowed });
        }
        self.found = Some(Arc::new(found));
        Ok(self)
    }

    /// Returns true if the name belongs to a scheme (such as NBD) and the operator allows it.
    /// Returns false if the name is the path of a file. Fails in all other cases.
    fn is_permitted(&self, allowed: &Allowed) -> Result<bool, ChainError> {
        let Some(NamedBy { path: image, name, .. }) = &self.named_by else { return Ok(false) };
        if let Some((scheme, name)) = scheme_of(Path::new(name)) {
            scheme.normalize(name).map_err(|e| self.refuse_for(e))?;
            return match allowed.permit(name) {
                Some(_) => Ok(true),
                None => Err(self.refuse(format!(
                    "it is not a file of this host: pass --backing-folder {} to allow it",
                    scheme.allowance(name)
                ))),
            };
        }
        if scheme_of(image).is_some() && !Path::new(name).is_absolute() {
            return Err(self.refuse(
                "an image that is not a file has no folder, so its backing file needs an absolute name",
            ));
        }
        if !names_a_path(name) {
            return Err(self.refuse("only files are supported, by their path"));
        }
        Ok(false)
    }
}

/// What images may name as their backing or data files.
pub(crate) struct Allowed {
    pub folders: Vec<PathBuf>,
    /// Names that schemes own, such as NBD URIs.
    pub names: Vec<String>,
}

impl Allowed {
    /// Returns what the options allow.
    pub fn by(options: &ChainOptions) -> Self {
        let owned = |name: &PathBuf| scheme_of(name).map(|(_, name)| name.to_string());
        let own =
            options.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut folders: Vec<_> = options
            .folders
            .iter()
            .filter(|name| owned(name).is_none())
            .map(|f| f.as_path())
            .collect();
        if folders.is_empty() {
            folders.push(own);
        }
        Allowed {
            folders: folders
                .iter()
                .filter_map(|folder| std::fs::canonicalize(folder).ok())
                .collect(),
            // Invalid names are reported where the options are parsed.
            names: options.folders.iter().filter_map(owned).collect(),
        }
    }

    /// Returns the name to open, if a scheme owns it and one of the operator's names permits it.
    pub fn permit(&self, name: &str) -> Option<String> {
        let (scheme, name) = scheme_of(Path::new(name))?;
        self.names.iter().find_map(|by| scheme.permit(by, name))
    }
}
