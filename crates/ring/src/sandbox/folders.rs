//! The folders that the process may use, enforced by Landlock.
//!
//! In: folders and files with an access each. Out: rules of the kernel for the calling thread and
//! all threads that it starts. What must hold: a folder that does not exist is left out, because a
//! rule belongs to a file, not to a name.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    make_bitflags,
};

/// The newest version of Landlock of which the server uses the restrictions of files.
const VERSION: ABI = ABI::V5;

/// What the process may do in a folder and below, or with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read files and list folders.
    Read,
    /// Read, write, create, rename and remove files; use devices.
    Write,
    /// Create and remove sockets.
    Sockets,
    /// Like `Write`, but only threads that control the server have it. Reactors and threads that
    /// open images do not; see [`Withheld`].
    Control,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        match self {
            Access::Read => make_bitflags!(AccessFs::{ReadFile | ReadDir}),
            Access::Write | Access::Control => make_bitflags!(AccessFs::{
                ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeSock | RemoveFile
                    | Refer | IoctlDev
            }),
            Access::Sockets => make_bitflags!(AccessFs::{MakeSock | RemoveFile}),
        }
    }
}

/// A folder, or a single file, and what the process may do with it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Folder {
    pub path: PathBuf,
    pub access: Access,
}

impl Folder {
    pub fn new(path: impl Into<PathBuf>, access: Access) -> Self {
        Folder { path: path.into(), access }
    }
}

/// Restricts the calling thread, and threads that it starts, to these folders. Adds what the kernel
/// cannot enforce to `lacks`. Returns whether the kernel restricts the opening of files.
pub fn restrict(folders: &[Folder], lacks: &mut Vec<String>) -> io::Result<bool> {
    let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    let rules = rules.scope(Scope::Signal).and_then(|rules| granting(rules, folders));
    let rules = rules.map_err(failed)?;
    match rules.restrict_self().map_err(failed)?.ruleset {
        RulesetStatus::FullyEnforced => Ok(true),
        RulesetStatus::PartiallyEnforced => {
            tracing::debug!("sandbox: the kernel has an older Landlock, without all restrictions");
            Ok(true)
        }
        RulesetStatus::NotEnforced => {
            lacks.push(
                "the kernel has no Landlock, so the server may open every file of its user".into(),
            );
            Ok(false)
        }
    }
}

fn failed(error: RulesetError) -> io::Error {
    io::Error::other(format!("Landlock: {error}"))
}

/// Returns a set of rules that grants these folders.
fn granting<'a>(
    rules: Ruleset,
    folders: impl IntoIterator<Item = &'a Folder>,
) -> Result<RulesetCreated, RulesetError> {
    let mut rules = rules.handle_access(AccessFs::from_all(VERSION))?.create()?;
    for Folder { path, access } in folders {
        let Ok(fd) = PathFd::new(path) else { continue };
        let rights = access.rights();
        // A rule for a file has no rights of folders.
        let is_folder = std::fs::metadata(path).is_ok_and(|meta| meta.is_dir());
        let rights = if is_folder { rights } else { rights & AccessFs::from_file(VERSION) };
        if !rights.is_empty() {
            rules = rules.add_rule(PathBeneath::new(fd, rights))?;
        }
    }
    Ok(rules)
}

/// The rules of threads that may not write into folders of [`Access::Control`].
pub struct Withheld(RulesetCreated);

impl Withheld {
    /// Returns `None` if there is no such folder: then those threads need no rules of their own.
    pub fn of(folders: &[Folder]) -> io::Result<Option<Self>> {
        let is_for_control = |folder: &&Folder| folder.access == Access::Control;
        if !folders.iter().any(|folder| is_for_control(&folder)) {
            return Ok(None);
        }
        let others = folders.iter().filter(|folder| !is_for_control(folder));
        let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
        Ok(Some(Withheld(granting(rules, others).map_err(failed)?)))
    }

    /// Restricts the calling thread, and threads that it starts.
    pub fn restrict(&self) -> io::Result<()> {
        self.0.try_clone()?.restrict_self().map(drop).map_err(failed)
    }
}

/// The folders that were granted, with links resolved. A question costs the same for one folder and
/// for thousands.
pub struct Granted(HashMap<PathBuf, Vec<Access>>);

impl Granted {
    pub fn new(folders: &[Folder]) -> Self {
        let mut all = HashMap::<_, Vec<_>>::new();
        for Folder { path, access } in folders {
            let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            all.entry(real).or_default().push(*access);
        }
        Granted(all)
    }

    /// Returns the folder of `path` if no granted folder contains the file, with links resolved.
    pub fn refused(&self, path: &Path) -> Option<PathBuf> {
        let real = real(path);
        let is_writable = |access: Access| access == Access::Write;
        let is_granted = self.contain(&real, is_writable);
        (!is_granted).then(|| real.parent().unwrap_or(&real).to_path_buf())
    }

    /// Returns whether a granted folder lets the process create a socket at `path`.
    pub fn may_listen(&self, path: &Path) -> bool {
        self.contain(&real(path), |access| matches!(access, Access::Write | Access::Sockets))
    }

    /// Returns whether a folder with a suitable access contains the file.
    fn contain(&self, real: &Path, is_suitable: impl Fn(Access) -> bool) -> bool {
        let given = |folder: &Path| self.0.get(folder).into_iter().flatten();
        real.ancestors().flat_map(given).any(|access| is_suitable(*access))
    }
}

/// Returns the real path of a file that may be missing.
pub(super) fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    if let Ok(real) = std::fs::canonicalize(&absolute) {
        return real;
    }
    let folder = absolute.parent().and_then(|folder| std::fs::canonicalize(folder).ok());
    match (folder, absolute.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_folder_of_a_file_outside_is_refused() {
        let temp = std::env::temp_dir().join(format!("blockyard-folders-{}", std::process::id()));
        let (inside, outside) = (temp.join("inside"), temp.join("outside"));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::write(outside.join("x"), "").unwrap();
        std::os::unix::fs::symlink(outside.join("x"), inside.join("link")).unwrap();
        let real_outside = std::fs::canonicalize(&outside).unwrap();
        let granted = Granted::new(&[
            Folder::new(&inside, Access::Write),
            Folder::new(&outside, Access::Sockets),
        ]);
        assert_eq!(granted.refused(&inside.join("new")), None);
        assert_eq!(granted.refused(&inside.join("link")), Some(real_outside.clone()));
        assert_eq!(granted.refused(&outside.join("new")), Some(real_outside));
        assert!(granted.may_listen(&inside.join("s")) && granted.may_listen(&outside.join("s")));
        assert!(!granted.may_listen(&temp.join("s")));
        let file = Granted::new(&[Folder::new(outside.join("x"), Access::Write)]);
        assert_eq!(file.refused(&outside.join("x")), None);
        std::fs::remove_dir_all(&temp).unwrap();
    }
}
