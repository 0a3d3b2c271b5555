use super::*;
use crate::journal::{Key, Recovered};

const SESSION: Session = Session { number: 7, boot: 9 };

/// A log in memory. Its file cannot grow, as on a full tmpfs: it is open for reading only.
fn full() -> Log {
    let words = Arc::new(SharedWords::anonymous(TOTAL).unwrap());
    Log::over(words, Some(File::open("/dev/null").unwrap()), SESSION)
}

fn change(cluster: u64) -> Record {
    Record { key: Key::Cluster(cluster), value: [1 << 16, 0] }
}

#[test]
fn without_space_a_change_makes_the_log_incomplete_and_writes_no_slot() {
    let log = full();
    assert!(!log.is_incomplete());
    log.record(change(1));
    assert!(log.is_incomplete());
    let slot = start_of(0);
    let slot = log.words[slot..slot + WORDS].iter();
    assert!(slot.map(|word| word.load(Ordering::Relaxed)).all(|word| word == 0));
}

/// A write-back puts all changes into the image. If it fails, the lost record still counts.
#[test]
fn only_the_end_of_a_write_back_makes_the_log_complete_again() {
    let log = full();
    log.record(change(1));
    let write_back = log.begin_write_back();
    assert!(log.is_incomplete(), "the change is not in the file yet");
    assert!(!log.end_write_back(write_back, false).survives);
    assert!(log.is_incomplete());
    assert!(log.end_write_back(log.begin_write_back(), true).survives);
    assert!(!log.is_incomplete());
    // A change during a write-back may have come too late for it.
    let write_back = log.begin_write_back();
    log.record(change(2));
    assert!(log.end_write_back(write_back, true).survives);
    assert!(log.is_incomplete());
}

fn with_room(room: [usize; 2]) -> Log {
    let words = Arc::new(SharedWords::anonymous(TOTAL).unwrap());
    Log::over(words, None, SESSION).with_room(room)
}

fn records(log: &Log) -> Vec<Record> {
    Recovered::new(log.words.clone(), None, SESSION).records().unwrap()
}

#[test]
fn the_old_half_stays_if_a_record_cannot_be_repeated() {
    let log = with_room([2, 0]);
    log.record(change(1));
    log.record(change(2));
    for _ in 0..2 {
        let write_back = log.begin_write_back();
        log.repeat(change(1));
        assert!(log.end_write_back(write_back, true).survives, "no change was lost");
        assert!(!log.is_incomplete());
        assert_eq!(records(&log), [change(1), change(2)]);
    }
    // Now the file has all changes.
    assert!(log.end_write_back(log.begin_write_back(), true).survives);
    assert_eq!(records(&log), []);
}

/// A change may rely on an earlier one, so no record follows a lost one.
#[test]
fn records_after_a_lost_one_count_only_when_its_change_is_in_the_file() {
    let log = with_room([1, 4]);
    log.record(change(1));
    log.record(change(2));
    let _ = log.begin_write_back();
    log.record(change(3));
    assert_eq!(records(&log), [change(1)]);
    let resumed = Log::over(log.words.clone(), None, SESSION);
    assert_eq!(records(&resumed), [change(1)], "the next server goes on after them");
    assert!(log.is_incomplete());
    let log = with_room([1, 4]);
    log.record(change(1));
    log.record(change(2));
    let again = log.begin_write_back();
    log.record(change(3));
    assert!(log.end_write_back(again, true).survives);
    assert_eq!((log.is_incomplete(), records(&log)), (false, vec![change(3)]));
}

/// The slots still have the records of the server that died.
#[test]
fn a_half_that_did_not_count_has_no_records_when_it_is_used_again() {
    let log = with_room([1, 4]);
    log.record(change(1));
    log.record(change(2));
    let _ = log.begin_write_back();
    log.record(change(3));
    // The next server dies, too.
    let next = Log::over(log.words.clone(), None, SESSION);
    assert_eq!(records(&next), [change(1)]);
    let log = Log::over(log.words.clone(), None, SESSION).with_room([1, 0]);
    let write_back = log.begin_write_back();
    log.record(change(4));
    log.end_write_back(write_back, true);
    assert_eq!(records(&log), []);
}

/// The file has the lost change, and a replay would name the cluster that the change freed.
#[test]
fn a_change_that_is_lost_during_a_write_back_releases_no_cluster() {
    let of = |value: u64| Record { key: Key::Cluster(1), value: [value << 16, 0] };
    let log = with_room([1, 1]);
    log.record(of(1));
    log.end_write_back(log.begin_write_back(), false);
    log.record(of(2));
    let write_back = log.begin_write_back();
    log.record(of(3));
    let ended = log.end_write_back(write_back, true);
    assert_eq!(records(&log), [of(2)]);
    assert_eq!(ended, Ended { survives: true, may_release: false });
    let ended = log.end_write_back(log.begin_write_back(), true);
    assert_eq!(ended, Ended { survives: true, may_release: true });
    assert_eq!((log.is_incomplete(), records(&log)), (false, Vec::new()));
    // The same in a half that the write-back began.
    let log = with_room([1, 1]);
    let write_back = log.begin_write_back();
    log.record(of(1));
    log.record(of(2));
    let ended = log.end_write_back(write_back, true);
    assert_eq!((ended.may_release, records(&log)), (false, vec![of(1)]));
}

/// A journal that never has space must not keep freed clusters for ever.
#[test]
fn a_log_without_records_does_not_keep_clusters_that_lost_changes_freed() {
    let log = full();
    let write_back = log.begin_write_back();
    log.record(change(1));
    let ended = log.end_write_back(write_back, true);
    assert_eq!(ended, Ended { survives: true, may_release: true });
    assert_eq!(records(&log), []);
}

/// A stale record would be replayed over the change in the file.
#[test]
fn an_earlier_value_of_a_lost_change_is_dropped_before_the_log_is_complete() {
    let of = |value: u64| Record { key: Key::Cluster(1), value: [value << 16, 0] };
    let log = with_room([1, 1]);
    log.record(of(1));
    log.end_write_back(log.begin_write_back(), false);
    log.record(of(2));
    log.record(of(3));
    assert_eq!(records(&log), [of(1), of(2)]);
    // A change during the write-back has no record either.
    let write_back = log.begin_write_back();
    log.record(of(4));
    assert!(log.end_write_back(write_back, true).survives);
    assert_eq!((log.is_incomplete(), records(&log)), (true, Vec::new()));
    log.record(of(5));
    assert_eq!(records(&log), []);
    assert!(log.end_write_back(log.begin_write_back(), true).survives);
    assert_eq!((log.is_incomplete(), records(&log)), (false, Vec::new()));
    // If the old half must stay, the change does not survive a death.
    log.record(of(6));
    log.record(of(7));
    let write_back = log.begin_write_back();
    log.record(change(8));
    log.repeat(change(9));
    assert!(!log.end_write_back(write_back, true).survives);
    assert!(log.is_incomplete());
}

/// Does a write-back after which only the changes of `repeated` are not in the file. Returns
/// whether the changes survive.
fn write_back(log: &Log, repeated: &[Record]) -> bool {
    let write_back = log.begin_write_back();
    repeated.iter().for_each(|record| log.repeat(*record));
    log.end_write_back(write_back, true).survives
}

/// Changes 1 and 2 have records. Change 1 stays partial, and there was no space for change 3.
#[test]
fn a_full_log_is_complete_again_when_it_has_space() {
    let of = |value: u64| Record { key: Key::Cluster(4), value: [value << 16, 0] };
    let mut log = with_room([2, 1]);
    [change(1), change(2), change(3)].into_iter().for_each(|change| log.record(change));
    let old = [change(1), change(2)];
    // The new half has space for one record only.
    let first = log.begin_write_back();
    log.record(of(1));
    log.repeat(change(1));
    assert!(!log.end_write_back(first, true).survives);
    log.record(of(2));
    assert_eq!(records(&log), old);
    log.room = [2, 3];
    // A thread may still be writing to the half when the write-back closes it.
    let closes = log.begin_write_back();
    let claimed = log.words[CLAIMED[1]].load(Ordering::Relaxed);
    log.record(change(5));
    log.repeat(change(1));
    assert_eq!(log.words[CLAIMED[1]].load(Ordering::Relaxed), claimed, "it is closed");
    assert!(!log.end_write_back(closes, true).survives);
    // A write-back that fails leaves the old half.
    let fails = log.begin_write_back();
    log.repeat(change(1));
    log.record(change(6));
    assert_eq!(records(&log), old, "they do not count yet");
    assert!(!log.end_write_back(fails, false).survives);
    assert_eq!((log.is_incomplete(), records(&log)), (true, old.to_vec()));
    assert!(!write_back(&log, &[change(1)]), "it closes the half again");
    let restarts = log.begin_write_back();
    log.repeat(change(1));
    log.record(change(7));
    assert_eq!(records(&log), old);
    let ended = log.end_write_back(restarts, true);
    assert_eq!(ended, Ended { survives: true, may_release: true });
    // No record of the half's earlier uses counts.
    assert_eq!((log.is_incomplete(), records(&log)), (false, vec![change(1), change(7)]));
    let resumed = Log::over(log.words.clone(), None, SESSION);
    assert_eq!(records(&resumed), [change(1), change(7)]);
    assert!(write_back(&log, &[change(1)]));
    assert_eq!(records(&log), [change(1)]);
}

#[test]
fn a_change_that_is_lost_after_a_restart_is_not_complete() {
    let mut log = with_room([1, 0]);
    [change(1), change(2)].into_iter().for_each(|change| log.record(change));
    assert!(!write_back(&log, &[change(1)]) && !write_back(&log, &[change(1)]));
    log.room = [1, 1];
    let restarts = log.begin_write_back();
    log.repeat(change(1));
    log.record(change(3));
    let ended = log.end_write_back(restarts, true);
    assert_eq!(ended, Ended { survives: true, may_release: false });
    assert_eq!((log.is_incomplete(), records(&log)), (true, vec![change(1)]));
    assert!(write_back(&log, &[change(1)]));
    assert_eq!((log.is_incomplete(), records(&log)), (false, vec![change(1)]));
}

/// The flush that had no space for the record came before the first change without one.
#[test]
fn a_half_that_never_had_space_restarts_too() {
    let mut log = with_room([2, 0]);
    [change(1), change(2)].into_iter().for_each(|change| log.record(change));
    assert!(write_back(&log, &[change(1)]), "all records are there");
    log.record(change(3));
    log.room = [2, 1];
    assert!(!write_back(&log, &[change(1)]), "it closes the half");
    assert_eq!(records(&log), [change(1), change(2)]);
    assert!(write_back(&log, &[change(1)]));
    assert_eq!((log.is_incomplete(), records(&log)), (false, vec![change(1)]));
}

/// Returns a log with a half that is not conditional and has a record of change 3. The other half
/// stays, because there was no space to repeat change 1.
fn with_two_halves() -> Log {
    let log = with_room([2, 1]);
    [change(1), change(2)].into_iter().for_each(|change| log.record(change));
    let first = log.begin_write_back();
    log.record(change(3));
    log.repeat(change(1));
    assert!(log.end_write_back(first, true).survives);
    log
}

/// Returns the log of the next server, which has no space for a record.
fn resumed(log: &Log) -> Log {
    Log::over(log.words.clone(), None, SESSION).with_room([2, 1])
}

/// Records that count must stay until the file has all changes.
#[test]
fn a_half_with_records_that_count_does_not_restart() {
    let mut log = with_two_halves();
    log.room = [9, 1];
    for mut log in [resumed(&with_two_halves()), log] {
        log.record(change(4));
        log.room = [9, 9];
        for _ in 0..3 {
            let write_back = log.begin_write_back();
            log.repeat(change(1));
            assert_eq!(records(&log), [change(1), change(2), change(3)]);
            assert!(!log.end_write_back(write_back, true).survives);
        }
        assert_eq!(records(&log), [change(1), change(2), change(3)]);
    }
}

/// The half has a record of the server that died, which a replay would put over the change.
#[test]
fn a_change_that_a_resumed_log_loses_during_a_write_back_releases_no_cluster() {
    let log = resumed(&with_two_halves());
    let write_back = log.begin_write_back();
    log.record(change(4));
    let ended = log.end_write_back(write_back, true);
    assert_eq!(ended, Ended { survives: true, may_release: false });
    assert_eq!(records(&log), [change(3)]);
}
