//! A sandbox is for good, so each test enters it in a process of its own.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use super::*;

const CHILD: &str = "BLOCKYARD_TEST_SANDBOX";

/// Runs `body` in a child process, which is this test again. Returns what the child left, or `None`
/// in the child.
fn in_child(name: &str, body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os(CHILD).is_some() {
        body();
        return None;
    }
    let name = format!("sandbox::tests::{name}");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output();
    Some(child.unwrap())
}

#[test]
fn a_refused_call_ends_the_process_with_one_line() {
    let body = || {
        enter(vec![Folder::new("/", Access::Write)]).unwrap();
        let thread = std::thread::Builder::new().name("reactor-7".into());
        let body = || {
            confine(Kind::Reactor);
            drop(std::net::UdpSocket::bind("127.0.0.1:0"));
        };
        let _ = thread.spawn(body).unwrap().join();
    };
    let Some(child) = in_child("a_refused_call_ends_the_process_with_one_line", body) else {
        return;
    };
    let stderr = String::from_utf8_lossy(&child.stderr);
    assert_eq!((child.status.code(), child.status.signal()), (Some(STATUS), None), "{stderr}");
    let line = format!("thread reactor-7 made system call {},", libc::SYS_socket);
    assert_eq!(stderr.lines().filter(|text| text.contains(&line)).count(), 1, "{stderr}");
}

#[test]
fn files_outside_of_the_folders_are_refused_and_threads_of_reactors_may_do_more() {
    let body = || {
        let temp = std::env::temp_dir().join(format!("blockyard-sandbox-{}", std::process::id()));
        let (inside, outside) = (temp.join("inside"), temp.join("outside"));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        let lacks =
            enter(vec![Folder::new(&inside, Access::Write), Folder::new(&temp, Access::Sockets)]);
        assert_eq!(lacks.unwrap(), Vec::<String>::new());
        std::fs::write(inside.join("new"), "x").unwrap();
        let refused = std::fs::write(outside.join("new"), "x").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert!(advice(&outside.join("new")).unwrap().contains("--allow-folder"));
        let listener = std::os::unix::net::UnixListener::bind(temp.join("socket"));
        listener.expect("a folder of sockets");
        // A reactor may not make a socket, and may not start a thread that may.
        let reactor = std::thread::spawn(move || {
            confine(Kind::Reactor);
            assert_eq!(std::fs::read(inside.join("new")).unwrap(), b"x");
            let bind = || drop(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
            crate::threads::spawn(std::thread::Builder::new(), bind).unwrap().join().unwrap();
        });
        reactor.join().unwrap();
        println!("whole");
        std::process::exit(0);
    };
    let name = "files_outside_of_the_folders_are_refused_and_threads_of_reactors_may_do_more";
    let Some(child) = in_child(name, body) else { return };
    let (out, err) =
        (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && out.contains("whole"), "{out} {err}");
}

#[test]
fn a_ring_of_a_sandbox_refuses_other_operations() {
    let body = || {
        enter(vec![Folder::new("/", Access::Write)]).unwrap();
        let mut ring = crate::uring::Uring::new().unwrap();
        confine(Kind::Reactor);
        assert_eq!(ring.result_of_nop(), -libc::EACCES);
        println!("whole");
        std::process::exit(0);
    };
    let Some(child) = in_child("a_ring_of_a_sandbox_refuses_other_operations", body) else {
        return;
    };
    let (out, err) =
        (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && out.contains("whole"), "{out} {err}");
}
