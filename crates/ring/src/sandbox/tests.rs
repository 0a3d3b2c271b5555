//! A sandbox is for good, so each test enters it in a process of its own.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use super::*;
use crate::testing::waits;

const CHILD: &str = "BLOCKYARD_TEST_SANDBOX";

/// Runs `body` in a child process, which is this test again. Returns what the child left, or `None`
/// in the child.
fn in_child(name: &str, body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os(CHILD).is_some() {
        body();
        return None;
    }
    Some(child(name, "1"))
}

/// Runs a test in a child process, which finds `case` in its environment.
fn child(name: &str, case: &str) -> Output {
    let name = format!("sandbox::tests::{name}");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(CHILD, case);
    waits::output(&mut command, &name)
}

/// Calls that no thread of a server may make.
const NEVER: &[libc::c_long] = &[
    libc::SYS_bpf,
    libc::SYS_execve,
    libc::SYS_init_module,
    libc::SYS_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_process_vm_readv,
    libc::SYS_ptrace,
    libc::SYS_setresuid,
    libc::SYS_unshare,
];

/// The kinds of threads, and calls that only others may make.
const KINDS: &[(Kind, &[libc::c_long])] = &[
    (Kind::Any, &[]),
    (Kind::Reactor, &[libc::SYS_socket, libc::SYS_connect, libc::SYS_io_uring_setup]),
    (Kind::Control, &[libc::SYS_socket, libc::SYS_connect]),
    (Kind::Log, &[libc::SYS_socket, libc::SYS_unlinkat, libc::SYS_io_uring_enter]),
    (Kind::Watchdog, &[libc::SYS_socket, libc::SYS_unlinkat, libc::SYS_io_uring_enter]),
    (Kind::Witness, &[libc::SYS_socket, libc::SYS_unlinkat, libc::SYS_sendmsg]),
];

/// Calls of a handler of signals, which may run on each thread.
const HANDLER: &[libc::c_long] = &[libc::SYS_sendto, libc::SYS_write];

/// Makes a call in a thread of a kind, with arguments that fail.
fn attempt(kind: Kind, call: libc::c_long) {
    let thread = std::thread::spawn(move || {
        confine(kind);
        let none = u64::MAX;
        // SAFETY: the sandbox refuses the call, or it fails: no argument is a valid address,
        // descriptor, user or flag.
        unsafe { libc::syscall(call, none, none, none, none, none, none) };
    });
    thread.join().unwrap();
}

#[test]
fn each_kind_of_thread_is_refused_what_its_work_does_not_need() {
    let name = "each_kind_of_thread_is_refused_what_its_work_does_not_need";
    if let Some(case) = std::env::var_os(CHILD) {
        let case: Vec<usize> =
            case.to_str().unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
        if case[0] == 1 {
            enter(vec![Folder::new("/", Access::Write)]).unwrap();
        }
        attempt(KINDS[case[1]].0, case[2] as libc::c_long);
        std::process::exit(0);
    }
    for (at, (kind, calls)) in KINDS.iter().enumerate() {
        for call in NEVER.iter().chain(*calls) {
            let result = |is_on| child(name, &format!("{is_on} {at} {call}"));
            let refused = result(1);
            let text = String::from_utf8_lossy(&refused.stderr);
            assert_eq!(refused.status.code(), Some(STATUS), "{kind:?} made call {call}: {text}");
            assert!(text.contains(&format!("made system call {call},")), "{kind:?}: {text}");
            // The same without a sandbox: this test would notice that it is off.
            assert_eq!(result(0).status.code(), Some(0), "{kind:?}, call {call}");
        }
        for call in HANDLER {
            let allowed = child(name, &format!("1 {at} {call}"));
            let text = String::from_utf8_lossy(&allowed.stderr);
            assert_eq!(allowed.status.code(), Some(0), "{kind:?}, call {call}: {text}");
        }
    }
}

/// Arguments of calls, and whether threads may make the calls with them.
fn arguments() -> Vec<(libc::c_long, [u64; 2], bool)> {
    let (bad, own) = (u64::MAX, u64::from(std::process::id()));
    let ioctl = |request: u64, is_allowed| (libc::SYS_ioctl, [bad, request], is_allowed);
    let mut all = vec![
        ioctl(libc::TIOCSTI, false),
        ioctl(0x541c, false), // TIOCLINUX
        ioctl(libc::TIOCSCTTY, false),
        ioctl(0x8933, true),  // SIOCGIFINDEX
        ioctl(0x8914, false), // SIOCSIFFLAGS
        ioctl(libc::FIONBIO, true),
        ioctl(libc::TCGETS, true),
        // The kernel ignores the upper half.
        ioctl(libc::FIONREAD | 1 << 32, true),
        ioctl(0x1277, true),
        ioctl(0xab03, true),
    ];
    for call in [libc::SYS_prlimit64, libc::SYS_sched_setaffinity] {
        let of = |process, is_allowed| (call, [process, bad], is_allowed);
        all.extend([of(1, false), of(own + 1, false), of(0, true), of(own, true)]);
    }
    all
}

#[test]
fn calls_that_type_into_terminals_or_change_other_processes_are_refused() {
    let name = "calls_that_type_into_terminals_or_change_other_processes_are_refused";
    if let Some(case) = std::env::var_os(CHILD) {
        let case: Vec<usize> =
            case.to_str().unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
        let (call, [first, second], _) = arguments()[case[1]];
        enter(vec![Folder::new("/", Access::Write)]).unwrap();
        let attempt = move || {
            confine(KINDS[case[0]].0);
            // SAFETY: the sandbox refuses the call, or it fails: it has no valid descriptor or
            // address.
            unsafe { libc::syscall(call, first, second, u64::MAX, u64::MAX) };
        };
        std::thread::spawn(attempt).join().unwrap();
        std::process::exit(0);
    }
    for (at, (call, given, is_allowed)) in arguments().into_iter().enumerate() {
        for kind in [0, 1, 5] {
            let done = child(name, &format!("{kind} {at}"));
            let status = if is_allowed { 0 } else { STATUS };
            let text = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(status), "{call} {given:x?}: {text}");
        }
    }
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
        // A call that a newer C library tries does not exist.
        // SAFETY: the filter answers the call; without it the arguments are no addresses.
        let newer = unsafe { libc::syscall(500, 0, 0, 0, 0, 0, 0) };
        assert_eq!(
            (newer, std::io::Error::last_os_error().raw_os_error()),
            (-1, Some(libc::ENOSYS))
        );
        // A reactor may not make a socket, and may not start a thread that may.
        let reactor = std::thread::spawn(move || {
            confine(Kind::Reactor);
            assert_eq!(std::fs::read(inside.join("new")).unwrap(), b"x");
            let bind = || drop(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
            crate::offload::threads::spawn(std::thread::Builder::new(), bind)
                .unwrap()
                .join()
                .unwrap();
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
fn reactors_and_threads_that_open_images_do_not_write_into_the_configuration() {
    let body = || {
        let temp = std::env::temp_dir().join(format!("blockyard-withheld-{}", std::process::id()));
        let (images, parts) = (temp.join("images"), temp.join("conf.d"));
        std::fs::create_dir_all(&images).unwrap();
        std::fs::create_dir_all(&parts).unwrap();
        let lacks = enter(vec![
            Folder::new(&images, Access::Write),
            Folder::new(&temp, Access::Read),
            Folder::new(&parts, Access::Control),
        ]);
        assert_eq!(lacks.unwrap(), Vec::<String>::new());
        assert!(advice(&parts.join("a.toml")).is_some(), "it is no folder of disks");
        let control = std::thread::spawn({
            let part = parts.join("a.toml");
            move || {
                confine(Kind::Control);
                std::fs::write(part, "x").unwrap();
            }
        });
        control.join().unwrap();
        let check = move || {
            std::fs::write(images.join("new"), "x").unwrap();
            assert_eq!(std::fs::read(parts.join("a.toml")).unwrap(), b"x");
            for part in ["a.toml", "b.toml"] {
                let refused = std::fs::write(parts.join(part), "y").unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
            }
        };
        let others = check.clone();
        let reactor = std::thread::spawn(move || {
            confine(Kind::Reactor);
            check();
        });
        reactor.join().unwrap();
        crate::offload::threads::spawn(std::thread::Builder::new(), others)
            .unwrap()
            .join()
            .unwrap();
        println!("whole");
        std::process::exit(0);
    };
    let name = "reactors_and_threads_that_open_images_do_not_write_into_the_configuration";
    let Some(child) = in_child(name, body) else { return };
    let (out, err) =
        (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && out.contains("whole"), "{out} {err}");
}

#[test]
fn a_ring_of_a_sandbox_refuses_other_operations() {
    let body = || {
        let file = std::env::temp_dir().join(format!("blockyard-ring-{}", std::process::id()));
        std::fs::write(&file, "").unwrap();
        enter(vec![Folder::new("/", Access::Write)]).unwrap();
        let mut ring = crate::uring::Uring::<crate::Handle>::new().unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let mut bell = crate::uring::doorbell::Doorbell::new(&event).unwrap();
        confine(Kind::Reactor);
        assert_eq!(ring.result_of_shutdown(), -libc::EACCES);
        assert_eq!(bell.result_of_socket(), -libc::EACCES);
        bell.ring();
        assert_eq!(rustix::io::read(&event, &mut [0; 8]), Ok(8));
        // As a journal that is set aside.
        std::fs::rename(&file, file.with_extension("aside")).unwrap();
        std::fs::remove_file(file.with_extension("aside")).unwrap();
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
