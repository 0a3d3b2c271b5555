//! A program that moves between servers, played by the test.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blockyard_ring::{Executor, Segments};

use super::handed;
use super::process::{ENDER, Introduction, MOST_ENDERS, Position, Process, Started};
use crate::opened::Opened;
use crate::targets::target::OpenTarget;
use crate::targets::{Limits, Shape};
use crate::{CacheMode, LookupFigures};

const IMAGE: &str = "exec:/p";
/// The program does not answer within this time.
const NEVER: Limits = Limits { start: Duration::from_secs(30), answer: Duration::from_millis(1) };

/// Returns a program, the stand-in for its process, and the program's end of the connection.
fn started(is_owned: bool) -> (Started, UnixStream, UnixStream) {
    let (stream, program) = UnixStream::pair().unwrap();
    let (process, watched) = UnixStream::pair().unwrap();
    let shape = Shape { size: 8192, granule: 4096 };
    let introduction = Introduction { shape, data: Vec::new(), discards: false };
    let mut process = Process::of_another(process.into());
    if is_owned {
        process.own();
    }
    let position = Position { next: 1, ..Position::default() };
    (Started { introduction, position, stream, process }, watched, program)
}

fn open(started: Started, limits: Limits) -> Arc<OpenTarget> {
    started.target(IMAGE, false).limits(limits).open(CacheMode::Writeback).unwrap()
}

fn read(target: &Arc<OpenTarget>) -> std::io::Result<usize> {
    let (executor, target) = (Executor::new().unwrap(), target.clone());
    let handle = executor.handle().clone();
    let read = async move { target.storage(&handle)?.read(Segments::buffer(4096), 0).await.1 };
    executor.block_on(read).unwrap()
}

fn flush(target: &Arc<OpenTarget>) -> std::io::Result<()> {
    let (executor, target) = (Executor::new().unwrap(), target.clone());
    let handle = executor.handle().clone();
    let flush = async move { target.storage(&handle)?.sync().await };
    executor.block_on(flush).unwrap()
}

/// Reads a question, and answers it.
fn answer(program: &UnixStream, question: &str, answer: &str) {
    let mut line = String::new();
    BufReader::new(program).read_line(&mut line).unwrap();
    assert_eq!(line, question);
    (&*program).write_all(answer.as_bytes()).unwrap();
}

#[test]
fn an_answer_that_comes_after_a_hand_over_is_dropped() {
    let (started, _process, program) = started(true);
    let old = open(started, NEVER);
    assert_eq!(read(&old).unwrap_err().kind(), ErrorKind::TimedOut);
    answer(&program, "locate 1 r 0 4096\n", "");

    let parcel = old.hand_over().unwrap().unwrap();
    drop(old);
    let (image, mut started) = handed::unpack(parcel).unwrap();
    assert_eq!((&*image, &*started.position.owed), (IMAGE, &[1][..]));
    started.process.own();
    let new = open(started, Limits::default());
    (&program).write_all(b"ok 1 4096 zero\n").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "locate 2 r 0 4096\n", "ok 2 4096 zero\n"));
        assert_eq!(read(&new).unwrap(), 4096);
    });
}

#[test]
fn a_program_that_has_failed_is_handed_over() {
    let (started, _process, program) = started(true);
    let old = open(started, Limits::default());
    (&program).write_all(b"nonsense\n").unwrap();
    assert!(read(&old).is_err());
    let parcel = old.hand_over().unwrap().unwrap();
    let (_, mut started) = handed::unpack(parcel).unwrap();
    started.process.own();
    assert!(read(&open(started, Limits::default())).is_err());
}

#[test]
fn a_server_that_is_not_the_owner_leaves_the_program_alone() {
    let (first, mut process, program) = started(false);
    let (second, _process, _) = started(false);
    let second = Started { stream: first.stream.try_clone().unwrap(), ..second };
    let fails = open(first, NEVER);
    assert_eq!(read(&fails).unwrap_err().kind(), ErrorKind::TimedOut);
    drop(fails);
    // The drop of the process is the last step.
    assert_eq!(process.read(&mut [0]).unwrap(), 0);
    program.set_nonblocking(true).unwrap();
    let nothing = (&program).read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock, "neither a question nor an end");
    program.set_nonblocking(false).unwrap();

    let goes_on = open(second, Limits::default());
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "locate 1 r 0 4096\n", "ok 1 4096 zero\n"));
        goes_on.own_program();
        assert_eq!(read(&goes_on).unwrap(), 4096);
    });
}

/// Returns the number of threads that wait for the ends of programs.
fn enders() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let named = |path: std::path::PathBuf| {
        // A thread may end meanwhile.
        std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == ENDER)
    };
    tasks.filter(|task| named(task.as_ref().unwrap().path())).count()
}

#[test]
fn programs_that_end_late_use_few_threads() {
    let programs: Vec<_> = (0..4 * MOST_ENDERS)
        .map(|_| {
            let (started, watched, _) = started(true);
            drop(started.process);
            watched
        })
        .collect();
    assert!((0..1000).all(|_| enders() <= MOST_ENDERS));
    for mut program in programs {
        program.shutdown(Shutdown::Write).unwrap();
        assert_eq!(program.read(&mut [0; 1]).unwrap(), 0, "a thread has seen its end");
    }
}

#[test]
fn invalidations_that_wait_are_bounded() {
    let (started, _process, program) = started(true);
    let target = open(started, Limits::default());
    // The read waits for its answer, and each invalidation waits for the read.
    let lines = "invalidate 0 4096\n".repeat(1025);
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "locate 1 r 0 4096\n", &lines));
        let error = read(&target).unwrap_err().to_string();
        assert!(error.contains("while 1024 others wait"), "{error}");
    });
}

#[test]
fn an_invalidation_of_a_program_makes_the_next_flush_reach_it() {
    let (started, _process, program) = started(true);
    let target = open(started, Limits::default());
    // Else this test hangs if no flush comes.
    program.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (&program).write_all(b"invalidate 0 4096\n").unwrap();
    answer(&program, "invalidated 0 4096\n", "");
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "flush 1\n", "ok 1\n"));
        flush(&target).unwrap();
    });
}

#[test]
fn a_program_without_space_says_so() {
    let (started, _process, program) = started(true);
    let target = open(started, Limits::default());
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "locate 1 r 0 4096\n", "full 1 the store\n"));
        let error = read(&target).unwrap_err();
        assert_eq!((error.kind(), &*error.to_string()), (ErrorKind::StorageFull, "the store"));
    });
}

#[test]
fn a_program_changes_its_size_and_the_next_server_knows_it() {
    let (started, _process, program) = started(true);
    let target = open(started, Limits::default());
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "locate 1 r 0 4096\n", "size 16384\nok 1 4096 zero\n"));
        assert_eq!(read(&target).unwrap(), 4096);
    });
    assert_eq!(target.size(), 16384);
    let (_, started) = handed::unpack(target.hand_over().unwrap().unwrap()).unwrap();
    assert_eq!(started.introduction.shape.size, 16384);
}

#[test]
fn a_size_that_no_disk_can_have_is_refused() {
    // The last one is 2^62 and a granule.
    for size in ["0", "4097", "4611686018427392000"] {
        let (started, _process, program) = started(true);
        let target = open(started, Limits::default());
        let line = format!("size {size}\nok 1 4096 zero\n");
        std::thread::scope(|scope| {
            scope.spawn(|| answer(&program, "locate 1 r 0 4096\n", &line));
            let error = read(&target).unwrap_err().to_string();
            let wanted = format!("it sent the size {size}, which is no size of a disk");
            assert!(error.contains(&wanted), "{error}");
        });
        assert_eq!(target.size(), 8192);
    }
}

#[test]
fn known_answers_and_questions_are_counted() {
    let (started, _process, program) = started(true);
    let target = open(started, Limits::default());
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let read_twice = async move {
        let storage = target.storage(&handle).unwrap();
        for _ in 0..2 {
            assert_eq!(storage.read(Segments::buffer(4096), 0).await.1.unwrap(), 4096);
        }
        storage.lookups()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| answer(&program, "locate 1 r 0 4096\n", "ok 1 4096 zero\n"));
        let lookups = executor.block_on(read_twice).unwrap();
        assert_eq!(lookups, LookupFigures { hits: 1, misses: 1 });
    });
}
