use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use blockyard_image::CacheMode;
use blockyard_ring::xen::{Machine, Node, Store};

use super::*;
use crate::config::Config;
use crate::options::serve::ServeOptions;
use crate::serve::shares;

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("blockyard-xen-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(path.join("images/below")).unwrap();
        for file in ["images/a.qcow2", "images/below/b", "secret"] {
            std::fs::write(path.join(file), "x").unwrap();
        }
        symlink(path.join("secret"), path.join("images/link")).unwrap();
        symlink("/dev/null", path.join("images/device")).unwrap();
        Folder(std::fs::canonicalize(path).unwrap())
    }

    fn parse(&self, target: &str) -> Result<(Option<Format>, String), String> {
        let text = target.replace('@', self.0.to_str().unwrap());
        let parsed = Target::parse(&text, &[self.0.join("images"), "/no/such/folder".into()]);
        let target = parsed.map_err(|e| format!("{e:#}"))?;
        Ok((target.format, target.path.strip_prefix(&self.0).unwrap().display().to_string()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn targets_outside_the_folders_are_refused() {
    let folder = Folder::new("targets");
    assert_eq!(
        folder.parse("@/images/a.qcow2"),
        Ok((Some(Format::Qcow2), "images/a.qcow2".into()))
    );
    assert_eq!(folder.parse("@/images/below/b"), Ok((None, "images/below/b".into())));
    assert_eq!(
        folder.parse("raw:@/images/a.qcow2"),
        Ok((Some(Format::Raw), "images/a.qcow2".into()))
    );
    assert_eq!(
        folder.parse("qcow2:@/images/../images/below/b"),
        Ok((Some(Format::Qcow2), "images/below/b".into()))
    );
    for (target, part) in [
        ("@/secret", "is outside the folders"),
        ("@/images/../secret", "is outside the folders"),
        ("@/images/link", "is outside the folders"),
        ("@/images/device", "is outside the folders"),
        ("@/images/none", "No such file"),
        ("images/a.qcow2", "begins with /"),
        ("ram:1G", "write [FORMAT:]PATH"),
        ("nbd://server/disk", "write [FORMAT:]PATH"),
        ("raw:nbd://server/disk", "begins with /"),
        ("", "begins with /"),
    ] {
        let error = folder.parse(target).unwrap_err();
        assert!(error.contains(part), "{target}: {error}");
    }
}

#[test]
fn types_folders_and_defaults_of_the_xen_table_are_parsed() {
    let text = "watch = \"vbd\"\nfolders = [\"/srv\"]\n[defaults]\ncache = \"writeback\"\nqueues \
                = 4\n\
                iops = 500\n";
    let args: XenArgs = toml::from_str(text).unwrap();
    args.check().unwrap();
    let defaults = args.defaults.as_ref().unwrap();
    assert_eq!((defaults.cache, defaults.queues, defaults.weight), (CacheMode::Writeback, 4, 100));
    let options = XenArgs { watch: vec!["mine".into()], ..XenArgs::default() };
    let both = options.or(&args);
    assert_eq!((both.watch, both.folders), (vec!["mine".to_string()], vec![PathBuf::from("/srv")]));
    assert!(options.check().unwrap_err().to_string().contains("--xen-folder"));
    for (text, part) in [
        ("watch = \"VBD/..\"\n", "a type of back end is vbd"),
        ("watch = 5\n", "a list of them"),
        ("[defaults]\nimage = \"x\"\n", "unknown field `image`"),
    ] {
        let error = toml::from_str::<XenArgs>(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// Waits until a node of XenStore has this value.
fn wait(store: &mut Store, path: &str, value: &str) {
    let (never, _writer) = rustix::pipe::pipe().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.read(path).unwrap().as_deref() != Some(value) {
        let event = store.event(never.as_fd(), Some(deadline)).unwrap();
        assert!(event.is_some(), "{path} is not {value}");
    }
}

#[test]
fn disks_of_a_toolstack_are_attached_and_detached() {
    let folder = Folder::new("toolstack");
    let image = folder.0.join("images/disk.raw");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let machine = Machine::new();
    let reactors = Arc::new(Reactors::start(1, &[]).unwrap());
    let shares = shares::from_configuration(&ServeOptions::default(), &Config::default()).unwrap();
    let yard = Yard::start(reactors, shares).unwrap();
    let args = XenArgs {
        watch: vec!["mine".into()],
        folders: vec![folder.0.join("images")],
        defaults: None,
    };
    let host = Host::Machine(machine.clone());
    let toolstacks = Toolstacks::start(args, &host, || None, &yard).unwrap();
    let mut store = machine.store(0).unwrap();
    store.watch("/local/domain/0/backend", "back").unwrap();
    let back = |number: u32| format!("/local/domain/0/backend/mine/7/{number}");
    for (number, target) in [(51712, image.clone()), (51728, folder.0.join("secret"))] {
        let front = format!("/local/domain/7/device/vbd/{number}");
        let (target, keys) = (target.to_str().unwrap(), ["frontend-id", "online", "mode", "state"]);
        let made = store.transaction(|t| {
            t.write(&format!("{front}/backend"), back(number))?;
            t.write(&format!("{front}/state"), 1)?;
            t.write(&format!("{}/frontend", back(number)), &front)?;
            t.write(&format!("{}/params", back(number)), target)?;
            let values = keys.iter().zip(["7", "1", "w", "1"]);
            values
                .into_iter()
                .try_for_each(|(key, value)| t.write(&format!("{}/{key}", back(number)), value))
        });
        made.unwrap();
    }
    wait(&mut store, &format!("{}/state", back(51728)), "6");
    let error = store.read(&format!("{}/hotplug-error", back(51728))).unwrap().unwrap();
    assert!(error.contains("is outside the folders"), "{error}");
    wait(&mut store, &format!("{}/hotplug-status", back(51712)), "connected");
    wait(&mut store, &format!("{}/state", back(51712)), "2");
    // The yard answers this command after it has dropped the refused disk.
    assert!(matches!(yard.remove("7:xvdb"), Err(YardError::NotFound { .. })));
    assert_eq!(yard.list().into_iter().map(|disk| disk.name).collect::<Vec<_>>(), ["7:xvda"]);
    let taken_back = store.transaction(|t| {
        t.write(&format!("{}/online", back(51712)), 0)?;
        t.write(&format!("{}/state", back(51712)), 5)
    });
    taken_back.unwrap();
    wait(&mut store, &format!("{}/state", back(51712)), "6");
    assert!(matches!(yard.report("7:xvda"), Err(YardError::NotFound { .. })));
    toolstacks.finish();
    assert!(yard.close().is_empty());
}
