use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use rustix::event::EventfdFlags;

use super::*;
use crate::Client;

/// A temporary folder, which is removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("blockyard-listener-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn eventfd(count: u32) -> OwnedFd {
    rustix::event::eventfd(count, EventfdFlags::CLOEXEC).unwrap()
}

/// Returns the next connection. Waits without a limit if none comes.
fn accept(listener: &Listener) -> OwnedFd {
    listener.accept(eventfd(0).as_fd()).unwrap().expect("a connection")
}

#[test]
fn a_path_with_a_control_character_is_refused_in_one_line() {
    let folder = Folder::new("control");
    let error = Listener::bind(&folder.0.join("a\nb")).err().unwrap();
    assert!(matches!(error, SocketError::ControlCharacter { .. }), "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
}

#[test]
fn a_socket_that_a_killed_server_left_is_replaced_and_a_live_one_is_not() {
    let folder = Folder::new("live");
    let path = folder.socket();
    let listener = Listener::bind(&path).unwrap();
    assert!(matches!(Listener::bind(&path), Err(SocketError::Taken { .. })));
    // The second `bind` has connected to find out whether a server listens. The first listener
    // accepts that connection, and then the connection of the test.
    drop(accept(&listener));
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"to the first").unwrap();
    let mut bytes = [0; 12];
    UnixStream::from(accept(&listener)).read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"to the first");
    // When a server is killed, its socket is closed, but the file stays.
    let left = folder.0.join("left");
    fs::hard_link(&path, &left).unwrap();
    drop(listener);
    fs::rename(&left, &path).unwrap();
    assert!(path.exists());
    let listener = Listener::bind(&path).unwrap();
    let _client = UnixStream::connect(&path).unwrap();
    accept(&listener);
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let folder = Folder::new("file");
    let path = folder.socket();
    fs::write(&path, "data").unwrap();
    assert!(matches!(Listener::bind(&path), Err(SocketError::NotASocket { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"data");
    fs::remove_file(&path).unwrap();
    // A symbolic link is not followed, whatever it points to.
    let target = folder.0.join("target");
    drop(UnixListener::bind(&target).unwrap());
    std::os::unix::fs::symlink(&target, &path).unwrap();
    assert!(matches!(Listener::bind(&path), Err(SocketError::NotASocket { .. })));
    assert!(target.exists() && fs::symlink_metadata(&path).unwrap().is_symlink());
}

#[test]
fn a_listener_removes_its_own_socket_and_not_its_successors() {
    let folder = Folder::new("own");
    let path = folder.socket();
    drop(Listener::bind(&path).unwrap());
    assert!(!path.exists());
    let first = Listener::bind(&path).unwrap();
    // Keep the file, so that the next file does not get the same inode number.
    let kept = folder.0.join("kept");
    fs::rename(&path, &kept).unwrap();
    let second = Listener::bind(&path).unwrap();
    drop(first);
    let _client = UnixStream::connect(&path).unwrap();
    accept(&second);
}

/// The next file may even have the same inode number.
#[test]
fn a_listener_that_has_removed_its_socket_removes_no_other() {
    let folder = Folder::new("removed");
    let path = folder.socket();
    let first = Listener::bind(&path).unwrap();
    first.remove_socket();
    assert!(!path.exists());
    for _ in 0..20 {
        let second = Listener::bind(&path).unwrap();
        first.remove_socket();
        assert!(path.exists());
        drop(second);
    }
    let _second = Listener::bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
}

#[test]
fn a_missing_folder_and_a_path_that_is_too_long_have_their_own_errors() {
    let folder = Folder::new("names");
    let missing = folder.0.join("missing").join("socket");
    let wrong = Listener::bind(&missing).err().unwrap();
    assert!(
        matches!(&wrong, SocketError::NoFolder { folder, .. } if missing.parent() == Some(folder)),
        "{wrong}"
    );
    let padded = |len: usize| {
        let name = len - folder.0.as_os_str().len() - 1;
        folder.0.join("x".repeat(name))
    };
    assert!(matches!(Listener::bind(&padded(108)), Err(SocketError::TooLong { len: 108, .. })));
    drop(Listener::bind(&padded(107)).unwrap());
}

#[test]
fn a_thread_that_waits_for_a_connection_can_be_woken() {
    let folder = Folder::new("wake");
    let listener = Listener::bind(&folder.socket()).unwrap();
    assert!(listener.accept(eventfd(1).as_fd()).unwrap().is_none());
    // If a connection and a wake-up arrive at once, the connection is not lost.
    let _client = UnixStream::connect(folder.socket()).unwrap();
    assert!(listener.accept(eventfd(1).as_fd()).unwrap().is_some());
    assert!(listener.accept(eventfd(1).as_fd()).unwrap().is_none());
}

#[test]
fn connections_are_taken_from_every_socket_of_an_address() {
    let mut listener = Listener::bind_tcp("127.0.0.1", 0).unwrap();
    let other = Listener::bind_tcp("127.0.0.1", 0).unwrap();
    let ports = [listener.port().unwrap(), other.port().unwrap()];
    assert!(ports[0] != 0 && ports[0] != ports[1]);
    let mut other = other;
    listener.sockets.append(&mut other.sockets);
    for port in [ports[1], ports[0], ports[1]] {
        let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let stream = accept(&listener);
        assert_eq!(
            Client::connected(&stream).description,
            client.local_addr().unwrap().to_string()
        );
        // A connection is in blocking mode, whatever mode its listener has.
        assert!(!rustix::fs::fcntl_getfl(&stream).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    }
    assert!(matches!(Listener::bind_tcp("127.0.0.1", ports[0]), Err(SocketError::Address { .. })));
}

#[test]
fn a_unix_peer_is_named_by_its_process() {
    let (one, _other) = UnixStream::pair().unwrap();
    assert_eq!(Client::connected(&one).description, format!("pid {}", std::process::id()));
    let folder = Folder::new("peer");
    let listener = Listener::bind(&folder.socket()).unwrap();
    assert_eq!(listener.port(), None);
}
