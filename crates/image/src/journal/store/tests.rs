use super::*;

/// The host gives the number of a device that is detached to the next one.
#[test]
fn a_journal_of_a_device_outlives_another_device_with_its_number() {
    let path = std::env::temp_dir().join(format!("blockyard-devices-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    let folder = StateFolder { path, boot: 7 };
    let device = |device| ImageKey { device, inode: 0, born: 0 };
    let first = folder.create(&device(1)).unwrap().session();
    // The next device of this number has no mark, and begins a journal.
    assert!(folder.find_marked(&device(1), None).unwrap().is_none());
    let second = folder.create(&device(1)).unwrap().session();
    let of = |number, session| {
        let found = folder.find_marked(&device(number), Some(session)).unwrap();
        found.map(|journal| journal.session())
    };
    // They take turns.
    for session in [first, second, first] {
        assert_eq!(of(1, session), Some(session));
    }
    // A copy of the first image on another device does not get the journal.
    assert_eq!((of(2, first), of(1, first)), (None, Some(first)));
    folder.remove(&device(1)).unwrap();
    assert_eq!((of(1, first), of(2, second), of(1, second)), (None, None, Some(second)));
    std::fs::remove_dir_all(&folder.path).unwrap();
}

#[test]
fn a_journal_of_another_version_is_kept_until_the_next_boot() {
    let path = std::env::temp_dir().join(format!("blockyard-journals-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    let folder = StateFolder { path, boot: 7 };
    let image = ImageKey { device: 1, inode: 2, born: 3 };
    drop(folder.create(&image).unwrap());
    assert!(folder.find(&image).unwrap().is_some());
    let file = File::options().write(true).open(folder.file(&image)).unwrap();
    file.write_all_at(&(MAGIC + 1).to_ne_bytes(), 0).unwrap();
    let error = folder.find(&image).err().unwrap().to_string();
    assert!(error.contains("another version of Blockyard"), "{error}");
    assert!(folder.file(&image).exists());
    let later = StateFolder { boot: 8, ..folder.clone() };
    assert!(later.find(&image).unwrap().is_none());
    assert!(!folder.file(&image).exists());
    std::fs::remove_dir_all(&folder.path).unwrap();
}

/// A volume is detached, and the next one has its device number and a file with the same inode.
#[test]
fn a_journal_of_a_file_outlives_another_file_with_its_numbers() {
    let path = std::env::temp_dir().join(format!("blockyard-volumes-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    let folder = StateFolder { path, boot: 7 };
    let file = |born| ImageKey { device: 1, inode: 2, born };
    let first = folder.create(&file(3)).unwrap().session();
    // The other file has no mark, and begins a journal.
    assert!(folder.find_marked(&file(4), None).unwrap().is_none());
    let second = folder.create(&file(4)).unwrap().session();
    let of = |born, session| {
        let found = folder.find_marked(&file(born), Some(session)).unwrap();
        found.map(|journal| journal.session())
    };
    // They take turns.
    for (born, session) in [(3, first), (4, second), (3, first)] {
        assert_eq!(of(born, session), Some(session));
    }
    // A file without a look before: its journal begins beside that of the first one.
    let third = folder.create(&file(5)).unwrap().session();
    assert_eq!((of(3, first), of(5, third)), (Some(first), Some(third)));
    // Without the mark the journal is out of date.
    assert_eq!(folder.find_marked(&file(5), None).unwrap().map(|j| j.session()), Some(third));
    std::fs::remove_dir_all(&folder.path).unwrap();
}
