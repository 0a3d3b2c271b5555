//! Finds the other program: beside this one, in the folder of helper programs, or in `PATH`.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Error: the program is in none of the searched folders.
#[derive(Debug, thiserror::Error)]
#[error(
    "{name} is missing: it is not in {places}; install it beside blockyard, or build it (make build)"
)]
pub struct Missing {
    name: String,
    places: String,
}

/// Returns the path of a program of this project.
pub fn find(name: &str) -> Result<PathBuf, Missing> {
    let own = std::env::current_exe().ok();
    find_in(name, own.as_deref().and_then(Path::parent), std::env::var_os("PATH").as_deref())
}

fn find_in(
    name: &str,
    own_folder: Option<&Path>,
    path: Option<&OsStr>,
) -> Result<PathBuf, Missing> {
    let near = own_folder.map(|folder| [folder.to_path_buf(), folder.join("../libexec/blockyard")]);
    let near: Vec<_> = near.into_iter().flatten().collect();
    let folders = near.iter().cloned().chain(path.into_iter().flat_map(std::env::split_paths));
    let program = |file: &PathBuf| {
        file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    folders.map(|folder| folder.join(name)).find(program).ok_or_else(|| {
        let near = near.iter().map(|folder| folder.display().to_string());
        Missing {
            name: name.into(),
            places: near.chain(["PATH".into()]).collect::<Vec<_>>().join(", "),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_program_is_found_and_the_error_names_the_places() {
        let base = std::env::temp_dir().join(format!("blockyard-peer-{}", std::process::id()));
        let put = |folder: &str, mode: u32| {
            let file = base.join(folder).join("x");
            std::fs::create_dir_all(base.join(folder)).unwrap();
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            file
        };
        let find = || find_in("x", Some(&base.join("bin")), Some(base.join("path").as_os_str()));
        // A file that cannot be executed is not the program.
        put("bin", 0o644);
        let missing = find().unwrap_err().to_string();
        let places = format!("{0}/bin, {0}/bin/../libexec/blockyard, PATH", base.display());
        assert!(missing.starts_with("x is missing") && missing.contains(&places), "{missing}");
        for folder in ["path", "bin/../libexec/blockyard", "bin"] {
            let file = put(folder, 0o755);
            assert_eq!(find().unwrap(), file);
        }
        std::fs::remove_dir_all(base).unwrap();
    }
}
