//! What images name as their backing and data files, and which of it may be opened.
//!
//! What must hold: no file is opened outside the operator's folders, whatever an image names; no
//! image is in a chain twice.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_storage::{FileId, Scheme, path_of, scheme_of};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::error::ChainError;
use super::options::ChainOptions;
use crate::format::Format;

/// Images of one chain, at most.
pub const MAX_DEPTH: usize = 200;

/// What must not be in a chain twice.
#[derive(PartialEq)]
pub(super) enum Place {
    File(FileId),
    /// What a scheme opens, by its normalized name.
    Other(String),
}

/// An image to be opened.
pub(super) struct Next {
    pub(super) path: PathBuf,
    pub(super) format: Option<Format>,
    /// The image whose backing (or data) file it is, and the name it has there.
    pub(super) named_by: Option<(PathBuf, String)>,
    /// What is under the path, or is to be. An image's names are judged and opened by this alone: a
    /// link may change at any time.
    pub(super) found: Option<Arc<OwnedFd>>,
}

impl Next {
    /// A file that this image names: relative names begin at its own folder.
    pub(super) fn names(&self, name: &str, format: Option<Format>) -> Next {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let path =
            if scheme_of(Path::new(name)).is_some() { name.into() } else { folder.join(name) };
        Next { path, format, named_by: Some((self.path.clone(), name.into())), found: None }
    }

    pub(super) fn refuse(&self, what: impl Into<String>) -> ChainError {
        let (path, backing) = self.named_by.clone().unwrap_or_default();
        ChainError::Backing { path, backing, what: what.into() }
    }

    /// None: it is a file of this host, or should be one.
    pub(super) fn scheme(&self) -> Option<(&'static dyn Scheme, &str)> {
        scheme_of(&self.path)
    }

    /// What an image names is reached as the operator says, for instance with the operator's
    /// certificates.
    pub(super) fn permitted(mut self, allowed: &Allowed) -> Next {
        if self.named_by.is_some()
            && let Some(name) = self.path.to_str().and_then(|name| allowed.permit(name))
        {
            self.path = name.into();
        }
        self
    }

    pub(super) fn may_be_opened(
        &self,
        depth: usize,
        seen: &mut Vec<Place>,
    ) -> Result<(), ChainError> {
        if depth >= MAX_DEPTH {
            return Err(self.refuse(format!("the chain is longer than {MAX_DEPTH} images")));
        }
        let me = match (self.scheme(), &self.found) {
            (Some((scheme, name)), _) => {
                Place::Other(scheme.normalize(name).map_err(|e| self.refuse(e.to_string()))?)
            }
            // What cannot be looked at cannot be opened either, and says why there.
            (None, found) => {
                match found.as_ref().map_or_else(|| FileId::of_path(&self.path), FileId::of_fd) {
                    Ok(id) => Place::File(id),
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

    /// Finds the file that an image names, and refuses one that lies where no such file may lie.
    /// The caller opens what was found here: under the same path there may be another file by then.
    pub(super) fn find(mut self, allowed: &Allowed) -> Result<Next, ChainError> {
        if self.named_by.is_none() || self.found.is_some() || self.is_permitted(allowed)? {
            return Ok(self);
        }
        let missing = |e: Errno| {
            match e {
            Errno::NOENT => self.refuse(format!(
                "{} is missing: restore it, or name the place where it is now (blockyard image rebase --unsafe)",
                self.path.display()
            )),
            _ => self.refuse(format!("{}: {e}", self.path.display())),
        }
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let found = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(missing)?;
        let real = rustix::fs::readlink(path_of(&found), Vec::new()).map_err(missing)?;
        let real = Path::new(OsStr::from_bytes(real.to_bytes()));
        if !allowed.folders.iter().any(|folder| real.starts_with(folder)) {
            let list: Vec<_> = allowed.folders.iter().map(|f| f.display().to_string()).collect();
            let (path, backing) = self.named_by.clone().unwrap_or_default();
            return Err(ChainError::Outside {
                path,
                backing,
                real: real.into(),
                allowed: list.join(", "),
            });
        }
        self.found = Some(Arc::new(found));
        Ok(self)
    }

    /// Returns whether a scheme owns the name and the operator allows it; an error for what is no
    /// file either.
    fn is_permitted(&self, allowed: &Allowed) -> Result<bool, ChainError> {
        let Some((image, name)) = &self.named_by else { return Ok(false) };
        if let Some((scheme, name)) = scheme_of(Path::new(name)) {
            scheme.normalize(name).map_err(|e| self.refuse(e.to_string()))?;
            return match allowed.permit(name) {
                Some(_) => Ok(true),
                None => Err(self.refuse(format!(
                    "it lies on a server: say --backing-folder {} to allow it",
                    scheme.allowance(name)
                ))),
            };
        }
        if scheme_of(image).is_some() && !Path::new(name).is_absolute() {
            return Err(
                self.refuse("an image on a server has no folder where a relative name begins")
            );
        }
        if name
            .split_once(':')
            .is_some_and(|(scheme, _)| !scheme.is_empty() && !scheme.contains('/'))
        {
            return Err(self.refuse("only files are supported, by their path"));
        }
        Ok(false)
    }
}

/// What images may name as their backing or data files.
pub(crate) struct Allowed {
    pub folders: Vec<PathBuf>,
    /// Names that schemes own.
    pub names: Vec<String>,
}

impl Allowed {
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
            // What is wrong with one is told where options are read.
            names: options.folders.iter().filter_map(owned).collect(),
        }
    }

    /// Returns the name as it is to be opened, if a scheme owns it and one of the operator's names
    /// lets images name it.
    pub fn permit(&self, name: &str) -> Option<String> {
        let (scheme, name) = scheme_of(Path::new(name))?;
        self.names.iter().find_map(|by| scheme.permit(by, name))
    }
}
