//! Enters the sandbox: another user, folders and system calls.
//!
//! In: the options and the configuration. Out: a process that the kernel confines. What must hold:
//! this runs before the process starts threads. What the configured disks need is granted; disks
//! that come later need `--allow-folder`. See docs/sandbox.md.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use blockyard_disk::Source;
use blockyard_program::ending::Failure;
use blockyard_ring::sandbox::{self, Access, Folder};
use blockyard_ring::witness::{self, Question};
use blockyard_ring::{holders, user};
use blockyard_storage::targets::exec;

use crate::claims::{ImageId, UnseenError};
use crate::config::{Config, files};
use crate::disks::early;
use crate::exports;
use crate::options::api::ApiArgs;
use crate::options::disk::DiskArgs;
use crate::options::nbd::NbdArgs;
use crate::options::sandbox::SandboxArgs;
use crate::options::xen::XenArgs;
use crate::process::looks::{self, LookError};
use crate::process::{journals, launcher};

/// Folders of the host that the C library and this program read: libraries, devices, limits, host
/// names.
const SYSTEM: [&str; 7] =
    ["/usr", "/lib", "/lib64", "/proc", "/sys", "/run/systemd/resolve", "/dev/urandom"];

/// Folder of the host's settings. A server that is not root reads all that its user may read.
const SETTINGS: &str = "/etc";

/// What a server of root reads of [`SETTINGS`]: names of hosts and users, time zone, libraries,
/// authorities of certificates. Root may read keys and passwords there, so the sandbox has to leave
/// them out.
const READ_BY_ROOT: [&str; 16] = [
    "ca-certificates",
    "gai.conf",
    "group",
    "host.conf",
    "hosts",
    "ld.so.cache",
    "localtime",
    "machine-id",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "pki/tls/certs",
    "protocols",
    "resolv.conf",
    "services",
    "ssl/certs",
];

/// Most programs of `exec:` images that start at the same time.
const PROGRAMS_AT_A_TIME: usize = 16;

/// What the server does, as far as the sandbox depends on it.
pub struct Needs<'a> {
    pub config: &'a Config,
    pub config_file: Option<&'a Path>,
    pub api: &'a ApiArgs,
    pub nbd: &'a NbdArgs,
    pub xen: &'a XenArgs,
    /// The socket of `--control`.
    pub control: Option<&'a Path>,
    pub attached: bool,
    /// Returns the data files of the running program of a disk's `exec:` image, if another server
    /// hands it over: of the disk with this name and of the image with this name.
    pub handed_program: &'a dyn Fn(&str, &str) -> Option<&'a [PathBuf]>,
}

/// Returns an error if the host lacks a folder or the user of the options. `config`: has some of
/// them as its keys.
pub fn check_host(args: &SandboxArgs, config: &Config) -> anyhow::Result<()> {
    check_folders(args, config)?;
    check_user(args, config)
}

fn check_folders(args: &SandboxArgs, config: &Config) -> anyhow::Result<()> {
    for folder in &args.allow_folders {
        let seen = early::look(folder);
        if seen.is_none() {
            let folder = folder.display();
            tracing::error!("--allow-folder {folder}: left out, because {NO_ANSWER}");
        }
        if seen.is_some_and(|seen| seen.id.is_none()) {
            let is_key = config.allow_folders.contains(folder);
            let option = if is_key { "allow-folders:" } else { "--allow-folder" };
            anyhow::bail!("{option} {}: there is no such folder", folder.display());
        }
    }
    Ok(())
}

fn check_user(args: &SandboxArgs, config: &Config) -> anyhow::Result<()> {
    if let Some(name) = &args.user {
        let option = user_option(name, config);
        if !user::exists(name).with_context(|| format!("{option} {name}"))? {
            anyhow::bail!("{option} {name}: this host has no such user");
        }
    }
    Ok(())
}

/// Returns what gave the name of the user, for messages.
fn user_option(name: &str, config: &Config) -> &'static str {
    if config.user.as_deref() == Some(name) { "user:" } else { "--user" }
}

/// Changes the user and enters the sandbox, as the options say.
pub fn enter(args: &SandboxArgs, needs: &Needs<'_>) -> Result<(), Failure> {
    reserve(needs.config_file, &needs.config.disks);
    let entered = become_confined(args, needs);
    early::end();
    entered
}

fn become_confined(args: &SandboxArgs, needs: &Needs<'_>) -> Result<(), Failure> {
    check_folders(args, needs.config).map_err(Failure::usage)?;
    // A directory service may know the user a moment later: a service manager tries again.
    check_user(args, needs.config)?;
    if let Some(name) = &args.user {
        user::become_user(name).with_context(|| {
            format!("{} {name}: cannot become this user", user_option(name, needs.config))
        })?;
    }
    if !args.is_on() {
        tracing::warn!(
            "the sandbox is off (--sandbox off): a fault in the server reaches every file and \
             system call of its user"
        );
        return Ok(());
    }
    if let Err(e) = witness::start() {
        tracing::warn!("sandbox: messages cannot name the process that holds an image: {e}");
    }
    if needs.api.api.is_some()
        && let Err(e) = launcher::start()
    {
        tracing::warn!("sandbox: `ctl upgrade` cannot start another server: {e:#}");
    }
    // The sandbox lets no thread start a program.
    let programs = start_programs(needs)?;
    let mut folders = folders(args, needs, user::is_root());
    folders.extend(programs.iter().flat_map(|file| granted_of(file)).map(writable));
    folders.extend(journals::folders().into_iter().map(|path| Folder::new(path, Access::Write)));
    if user::is_root() {
        // After the witness, which looks into processes of all users.
        let devices = makes_devices(args, needs);
        user::keep_few_capabilities(devices).context("giving up capabilities")?;
    }
    for Folder { path, access } in &folders {
        tracing::debug!("sandbox: {access:?} in {}", path.display());
    }
    let lacks = sandbox::enter(folders).context("entering the sandbox (--sandbox off: none)")?;
    lacks.iter().for_each(|lack| tracing::warn!("sandbox: {lack}"));
    Ok(())
}

/// Starts the programs of `exec:` images that no other server has started. Returns the files in
/// which the data of all programs lie. A program that does not start ends its own disk only. If all
/// disks fail so, this returns an error.
fn start_programs(needs: &Needs<'_>) -> anyhow::Result<Vec<PathBuf>> {
    let (mut files, mut names) = (Vec::new(), Vec::new());
    for disk in &needs.config.disks {
        let Some((scheme, name)) = Source::scheme_of(&disk.image) else { continue };
        if scheme.program(name).is_none() {
            continue;
        }
        match (needs.handed_program)(&disk.name(), name) {
            Some(running) => files.extend_from_slice(running),
            None => names.push(name),
        }
    }
    let mut failed = 0;
    // A program may take its time to be ready.
    for some in names.chunks(PROGRAMS_AT_A_TIME) {
        let started: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> =
                some.iter().map(|name| scope.spawn(|| exec::start_early(name))).collect();
            starts.into_iter().map(|start| start.join()).collect()
        });
        for (name, started) in some.iter().zip(started) {
            let started = started.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match started {
                Ok(of_program) => files.extend(of_program),
                Err(e) => {
                    failed += 1;
                    anyhow::ensure!(failed < needs.config.disks.len(), "image {name}: {e}");
                    tracing::error!("image {name}: {e}");
                }
            }
        }
    }
    Ok(files)
}

fn writable(path: PathBuf) -> Folder {
    Folder::new(std::path::absolute(&path).unwrap_or(path), Access::Write)
}

/// Logs what a server of root may do.
pub fn report(args: &SandboxArgs) {
    if args.is_on() && user::is_root() {
        tracing::info!(
            "the server stays root, with few capabilities, in the folders of its disks (--user \
             NAME: it becomes another user)"
        );
    }
}

/// Runs the process that answers what the sandbox hides from a server.
pub fn run_witness() -> std::io::Result<()> {
    witness::run(|Question { kind, numbers }| match kind {
        holders::KIND => holders::answer(numbers),
        blockyard_export::ublk::KIND => blockyard_export::ublk::answer(numbers[0]),
        _ => String::new(),
    })
}

/// Notes which files belong to the configuration, and which programs the next server starts: no
/// disk may use them.
pub fn reserve<'a>(config: Option<&Path>, disks: impl IntoIterator<Item = &'a DiskArgs>) {
    let programs = disks.into_iter().filter_map(|disk| {
        let (scheme, name) = Source::scheme_of(&disk.image)?;
        scheme.program(name)
    });
    let own = std::env::current_exe().ok();
    let reserved = config.map(files::reserved).unwrap_or_default();
    sandbox::reserve(reserved.and(programs.chain(own)));
}

/// What is wrong with a path of the server's configuration or of its programs.
const RESERVED: &str = "it belongs to the server's configuration or is a program of it, which no \
                        disk may use: choose another place";

/// What is wrong with a path for which the sandbox has no rule, because its file system did not
/// answer when the server made the rules.
const LATE: &str = "its file system did not answer when the server started, so the sandbox refuses \
                    it: upgrade the server (`blockyard ctl upgrade`), or restart it";

const NO_ANSWER: &str = "its file system does not answer";

/// Returns whether the file system of a path of the disk did not answer at the start.
pub fn was_late(disk: &DiskArgs) -> bool {
    named(disk).iter().any(|named| early::was_late(&named.path))
}

/// A path that a disk names, and what the disk uses it for.
struct Named {
    what: &'static str,
    path: PathBuf,
    /// Returns why the sandbox refuses the path.
    advise: fn(&Path) -> Option<String>,
}

impl Named {
    /// Returns why no disk may use the path. Resolves links, so it waits for the file system.
    fn wrong(&self) -> Option<String> {
        let wrong = match sandbox::is_reserved(&self.path) {
            true => Some(RESERVED.to_string()),
            false => (self.advise)(&self.path).map(|advice| match early::was_late(&self.path) {
                true => LATE.to_string(),
                false => advice,
            }),
        };
        wrong.map(|wrong| format!("{} {}: {wrong}", self.what, self.path.display()))
    }
}

/// Returns the paths that a disk names, the image first.
fn named(disk: &DiskArgs) -> Vec<Named> {
    // The error about a missing image is better.
    let of_present = |path: &Path| path.exists().then(|| sandbox::advice(path)).flatten();
    // The kernel lets the server read more folders than a disk may name, such as /usr.
    let of_content =
        |folder: &Path| folder.exists().then(|| sandbox::advice(&folder.join("*"))).flatten();
    // A folder of sockets only is enough for a socket.
    let of_socket =
        |path: &Path| (!sandbox::may_listen(path)).then(|| sandbox::advice(path)).flatten();
    let mut all = Vec::new();
    let mut add = |what, path, advise| all.push(Named { what, path, advise });
    image_of(disk).into_iter().for_each(|image| add("image", image, of_present));
    local_folders(disk).for_each(|folder| add("backing folder", folder.clone(), of_content));
    exports::sockets(disk).into_iter().for_each(|socket| add("socket", socket, of_socket));
    exports::controls(disk).for_each(|device| add("device", device.into(), sandbox::advice));
    all
}

/// Returns the identity of a new disk's image. Returns an error if the disk names files of the
/// server's configuration, or if the sandbox refuses what the disk needs. (A client could write
/// into such files what the next server does, outside the sandbox.) Waits at most `limit` for the
/// file systems.
pub fn check(
    disk: &DiskArgs,
    limit: Duration,
) -> Result<anyhow::Result<Option<ImageId>>, UnseenError> {
    let (name, args, named) = (disk.name(), disk.clone(), named(disk));
    let paths: Vec<_> = named.iter().map(|named| named.path.clone()).collect();
    let uses: Vec<_> = named.iter().map(|named| named.what).collect();
    if paths.is_empty() {
        return Ok(Ok(ImageId::of(disk)));
    }
    let seen = looks::look_at(paths.clone(), limit, move |position| {
        // The first path is the image, if it is a file.
        let image = ImageId::of(&args);
        let find = |(at, named): (usize, &Named)| {
            position.is_at(at);
            named.wrong()
        };
        (image, named.iter().enumerate().find_map(find))
    });
    let unseen = |error: LookError| {
        let at = paths.iter().position(|path| path == error.path());
        UnseenError { disk: name.clone(), what: at.map_or("image", |at| uses[at]), error }
    };
    let (image, wrong) = seen.map_err(unseen)?;
    Ok(wrong.map_or(Ok(image), |wrong| Err(anyhow::anyhow!("disk \"{name}\": {wrong}"))))
}

/// Returns what the server may read of the host's settings, whatever its disks are.
fn settings(is_root: bool) -> Vec<PathBuf> {
    let settings = Path::new(SETTINGS);
    let mut all = if is_root {
        READ_BY_ROOT.iter().map(|name| settings.join(name)).collect()
    } else {
        vec![settings.to_path_buf()]
    };
    // The program that writes this file replaces it, often in a folder below /run.
    let resolver = std::fs::canonicalize(settings.join("resolv.conf")).ok();
    let folder = resolver.as_deref().and_then(Path::parent).filter(|f| !f.starts_with(settings));
    all.extend(folder.map(Path::to_path_buf));
    all
}

/// Returns whether the server makes block devices, now or later: the kernel allows that to few.
fn makes_devices(args: &SandboxArgs, needs: &Needs<'_>) -> bool {
    let later = args.allow_folders.iter().filter_map(|folder| Some(early::look(folder)?.real));
    needs.attached
        || !devices(needs).is_empty()
        || later
            .into_iter()
            .any(|folder| Path::new("/dev").starts_with(&folder) || folder.starts_with("/dev/xen"))
}

fn folders(args: &SandboxArgs, needs: &Needs<'_>, is_root: bool) -> Vec<Folder> {
    let (mut all, mut known) = (Vec::new(), HashSet::new());
    let mut add = |path: &Path, access| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        let folder = Folder::new(path, access);
        if known.insert(folder.clone()) {
            all.push(folder);
        }
    };
    SYSTEM.iter().for_each(|path| add(Path::new(path), Access::Read));
    settings(is_root).iter().for_each(|path| add(path, Access::Read));
    add(Path::new("/dev/null"), Access::Write);
    let allowed = args.allow_folders.iter().filter(|folder| answers(folder));
    allowed.for_each(|folder| add(folder, Access::Write));
    if let Some(file) = needs.config_file {
        let root = files::root(file);
        add(root, Access::Read);
        let main = std::fs::canonicalize(files::main(file)).ok();
        main.as_deref().and_then(Path::parent).iter().for_each(|folder| add(folder, Access::Read));
        let parts = root.join(files::FOLDER);
        linked_from(&parts).for_each(|folder| add(&folder, Access::Read));
        if needs.api.api.is_some() {
            // The API keeps changes there (ctl --persist).
            add(&parts, Access::Control);
        }
    }
    let api = needs.api.api.as_deref().filter(|socket| !socket.starts_with("fd:"));
    if let Some(socket) = api {
        add(folder_of(Path::new(socket)), Access::Sockets);
    }
    if let Some(socket) = needs.control {
        add(folder_of(socket), Access::Sockets);
    }
    if let Some(folder) = &needs.nbd.tls_certificates {
        add(folder, Access::Read);
        linked_from(folder).for_each(|folder| add(&folder, Access::Read));
    }
    needs.xen.folders.iter().for_each(|folder| add(folder, Access::Write));
    for disk in &needs.config.disks {
        let folders = local_folders(disk).filter(|folder| answers(folder));
        folders.for_each(|folder| add(folder, Access::Write));
        exports::sockets(disk).iter().for_each(|socket| add(folder_of(socket), Access::Sockets));
        if let Some(image) = image_of(disk) {
            granted_of(&image).iter().for_each(|path| add(path, Access::Write));
        }
        for folder in certificates_of(disk).into_iter().filter(|folder| answers(folder)) {
            add(&folder, Access::Read);
            linked_from(&folder).for_each(|folder| add(&folder, Access::Read));
        }
    }
    devices(needs).iter().for_each(|path| add(path, Access::Write));
    all
}

/// Returns the devices of ublk, Xen and the kernel's NBD client, as far as the server uses them.
fn devices(needs: &Needs<'_>) -> Vec<PathBuf> {
    let mut devices = exports::devices(&needs.config.disks, !needs.xen.watch.is_empty());
    if needs.attached {
        let is_nbd = |name: &str| {
            name.strip_prefix("nbd").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
        };
        let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let names = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_nbd));
        devices.extend(names.map(|entry| entry.path()));
    }
    devices
}

/// Returns the file of a disk's image, or `None` if it is not on this host.
fn image_of(disk: &DiskArgs) -> Option<PathBuf> {
    match Source::scheme_of(&disk.image) {
        Some((scheme, name)) => scheme.file(name),
        None => Some(disk.image.clone()),
    }
}

/// Returns what an image needs: the device itself, or the folders of the file, with and without
/// links resolved. If its file system does not answer, an image has nothing: a rule for its folder
/// would wait for it.
fn granted_of(image: &Path) -> Vec<PathBuf> {
    let Some(seen) = early::look(image) else { return Vec::new() };
    let real = seen.real;
    if seen.is_device { vec![real] } else { vec![folder_of(&real).into(), folder_of(image).into()] }
}

/// Returns whether the file system of a path answers. A rule for a path waits for it.
fn answers(path: &Path) -> bool {
    early::look(path).is_some()
}

/// Returns the folders that the links in a folder lead to: certificates and configuration files are
/// often links, and programs replace what these lead to.
fn linked_from(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    links.filter_map(|link| Some(std::fs::canonicalize(link.path()).ok()?.parent()?.to_path_buf()))
}

/// Returns the folders of backing images that are not remote.
fn local_folders(disk: &DiskArgs) -> impl Iterator<Item = &PathBuf> {
    disk.backing_folders.iter().filter(|name| blockyard_storage::scheme_of(name).is_none())
}

/// Returns the folders of certificates that a disk's remote images name.
fn certificates_of(disk: &DiskArgs) -> Vec<PathBuf> {
    let names = disk.backing_folders.iter().chain([&disk.image]);
    let described = names.filter_map(|name| blockyard_storage::scheme_of(name));
    described.filter_map(|(scheme, name)| scheme.folder(name)).collect()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(text: &str, api: Option<&str>) -> Vec<Folder> {
        let config: Config = toml::from_str(text).unwrap();
        let args = SandboxArgs { allow_folders: vec!["/more".into()], ..SandboxArgs::default() };
        let api = ApiArgs { api: api.map(String::from), ..ApiArgs::default() };
        let (config_file, attached) = (Some(Path::new("/conf/disks.toml")), false);
        let (nbd, xen) = (&config.nbd, &config.xen);
        let control = None;
        let needs = Needs {
            config: &config,
            config_file,
            api: &api,
            nbd,
            xen,
            control,
            attached,
            handed_program: &|_, _| None,
        };
        let system: Vec<_> = SYSTEM.iter().map(PathBuf::from).chain(settings(true)).collect();
        let null = Path::new("/dev/null");
        let is_own = |folder: &Folder| !system.contains(&folder.path) && folder.path != null;
        folders(&args, &needs, true).into_iter().filter(is_own).collect()
    }

    #[test]
    fn root_reads_no_passwords_and_keys_of_the_host() {
        assert_eq!(settings(false)[0], Path::new("/etc"));
        let secret = ["/etc/shadow", "/etc/ssh/key", "/etc/ssl/private/key"].map(Path::new);
        let root = settings(true);
        assert!(root.contains(&"/etc/hosts".into()));
        assert!(!root.iter().any(|path| secret.iter().any(|secret| secret.starts_with(path))));
    }

    #[test]
    fn the_folders_of_disks_sockets_and_certificates_are_granted() {
        // This program is not the one that looks at images.
        early::end();
        let text = "[nbd]\ntls-certificates = \"/tls\"\n\
                    [[disk]]\nimage = \"/images/a.qcow2\"\nvhost-user = \"/run/a.sock\"\n\
                    backing-folders = [\"/golden\"]\n\
                    [[disk]]\nimage = \"delay:file=/slow/b.img,parallel=2\"\n\
                    nbd = \"unix:/sockets/b\"\n\
                    [[disk]]\nimage = \"ram:1M\"\nvhost-user = \"fd:3\"\n\
                    [[disk]]\nimage = \"nbds://host/x?tls-certificates=/client\"\nnbd = \"tcp:h:1\"\n";
        let new = Folder::new;
        let expected = [
            new("/more", Access::Write),
            new("/conf", Access::Read),
            new("/conf/conf.d", Access::Control),
            new("/api", Access::Sockets),
            new("/tls", Access::Read),
            new("/golden", Access::Write),
            new("/run", Access::Sockets),
            new("/images", Access::Write),
            new("/sockets", Access::Sockets),
            new("/slow", Access::Write),
            new("/client", Access::Read),
        ];
        assert_eq!(granted(text, Some("/api/socket")), expected);
    }

    #[test]
    fn a_device_is_granted_alone_and_ublk_needs_all_devices() {
        // This program is not the one that looks at images.
        early::end();
        let disk = "[[disk]]\nimage = \"/dev/zero\"\nvhost-user = \"fd:3\"\n";
        let conf = Folder::new("/conf", Access::Read);
        let (more, write) = (Folder::new("/more", Access::Write), Access::Write);
        let alone = [more.clone(), conf.clone(), Folder::new("/dev/zero", write)];
        assert_eq!(granted(disk, None), alone);
        let ublk = "[[disk]]\nimage = \"ram:1M\"\nublk = true\n";
        assert_eq!(granted(ublk, None), [more, conf, Folder::new("/dev", write)]);
    }
}
