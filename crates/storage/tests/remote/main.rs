//! The NBD client against a scripted server: correct, wrong, dying and silent.

mod hub;
mod outage;
mod server;
mod status;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_nbd::wire::{self, Headers, Request, chunk, cmd, errno};
use blockyard_ring::{Executor, Segments};
use blockyard_storage::nbd::{self, Remote};
use blockyard_storage::{CacheMode, ImageFile, OpenOptions, Storage, Store};

use self::server::{Disk, SIZE, Script, Server, data, done, good, piece, simple};

/// For servers that do not answer. The handshakes before that are under the same timeout: a machine
/// that stops for some seconds must not look like a silent server.
const SHORT: nbd::Options =
    nbd::Options { reconnect: Duration::from_millis(400), timeout: Duration::from_secs(8) };
/// Timeouts for tests that are not about silence: a stall of the machine must not look like a
/// silent server. After an error the client connects again soon.
const TALKING: nbd::Options =
    nbd::Options { reconnect: Duration::from_millis(400), timeout: Duration::from_secs(60) };
/// Limit for events that a busy machine may delay.
const SOON: Duration = Duration::from_secs(60);
/// Longest time of a test. A client that waits for its own timeouts ends before.
const HANGS: Duration = Duration::from_secs(300);
const LONG: nbd::Options =
    nbd::Options { reconnect: Duration::from_secs(20), timeout: Duration::from_secs(20) };

fn on_image<T: 'static>(
    server: &Server,
    options: nbd::Options,
    work: impl AsyncFnOnce(Store) -> T + 'static,
) -> T {
    let file = open(server, options);
    let executor = Executor::new().unwrap();
    let store = file.storage(executor.handle()).unwrap();
    run(&executor, async move { work(store).await })
}

/// Opens the image on a server. Tries again if the machine stops during the handshake, for longer
/// than the client waits: this server is silent only later.
fn open(server: &Server, nbd: nbd::Options) -> ImageFile {
    let limit = nbd.timeout;
    let options = OpenOptions { nbd, ..OpenOptions::new(server.uri(), false, CacheMode::None) };
    let begun = Instant::now();
    loop {
        let attempt = Instant::now();
        match ImageFile::open(&options) {
            Ok(file) => return file,
            Err(e) if attempt.elapsed() < limit || begun.elapsed() > SOON => panic!("{e}"),
            Err(_) => {}
        }
    }
}

/// Runs a test on the executor. It fails if the test hangs.
fn run<T: 'static>(executor: &Executor, test: impl Future<Output = T> + 'static) -> T {
    let handle = executor.handle().clone();
    executor.handle().spawn(async move {
        handle.sleep(HANGS).await;
        handle.stop();
    });
    executor.block_on(test).expect("the test hangs")
}

/// Returns true if the bytes are those of the server's initial disk at `offset`.
fn is_pattern(segments: &Segments, offset: u64) -> bool {
    let mut bytes = vec![0; segments.len()];
    segments.copy_out(0, &mut bytes);
    (offset..).zip(bytes).all(|(at, byte)| byte == (at / 512 % 251) as u8)
}

fn script(
    work: impl FnMut(usize, &Request, &mut Disk) -> Option<Vec<u8>> + Send + 'static,
) -> Script {
    Box::new(work)
}

#[test]
fn all_kinds_of_headers_and_sizes() {
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        let server =
            Server::start(headers, |_, _| (), script(|_, request, disk| Some(good(request, disk))));
        on_image(&server, LONG, async |store| {
            for (offset, len) in
                [(0, 512), (512, 4096), (3, 5), (100, 70_000), (0, SIZE), (SIZE - 512, 512)]
            {
                let (segments, result) = store.read(Segments::buffer(len as usize), offset).await;
                result.unwrap();
                assert!(is_pattern(&segments, offset), "{offset}+{len}");
            }
            store.write(Segments::from_bytes(&[0xee; 3000]), 5000, true).await.1.unwrap();
            let (segments, _) = store.read(Segments::buffer(3000), 5000).await;
            assert_eq!(
                segments.find_difference(0, &Segments::from_bytes(&[0xee; 3000]), 0, 3000),
                None
            );
            store.sync().await.unwrap();
            let behind = store.write(Segments::buffer(512), SIZE, false).await.1;
            assert!(behind.unwrap_err().to_string().contains("after the end"));
            assert_eq!(store.len().await.unwrap(), SIZE);
        });
    }
}

#[test]
fn many_chunks_in_any_order_and_holes() {
    let server = Server::start(
        Headers::Structured,
        |_, _| (),
        script(|_, request, disk| {
            let mut out = Vec::new();
            let third = request.len / 4;
            for part in [2, 0, 3] {
                let at = request.offset + part * third;
                let bytes = disk.bytes[at as usize..(at + third) as usize].to_vec();
                out.extend(data(request, disk, at, &bytes, 0));
            }
            let mut hole = (request.offset + third).to_be_bytes().to_vec();
            hole.extend((third as u32).to_be_bytes());
            out.extend(piece(request, disk, chunk::OFFSET_HOLE, 0, &hole));
            out.extend(done(request, disk));
            Some(out)
        }),
    );
    on_image(&server, LONG, async |store| {
        let segments = Segments::from_bytes(&[9; 65536]);
        let (segments, result) = store.read(segments, 8192).await;
        result.unwrap();
        assert!(is_pattern(&segments.slice(0, 16384), 8192));
        assert_eq!(segments.find_nonzero(16384, 16384), None);
        assert!(is_pattern(&segments.slice(32768, 32768), 8192 + 32768));
    });
}

/// A function that returns the bytes of a wrong answer to a request.
type Lie = fn(&Request, &Disk) -> Vec<u8>;

/// Each wrong answer ends the connection, and the request fails in time with an error that says
/// why. When the server answers correctly again, it is used again.
#[test]
fn wrong_answers_end_in_errors() {
    let lies: [(&str, Headers, Lie); 19] = [
        ("no reply", Headers::Simple, |_, _| vec![0x42; 64]),
        ("no reply", Headers::Structured, |_, _| vec![0x42; 64]),
        ("was not sent", Headers::Simple, |request, _| simple(0, request.cookie + 1)),
        ("was not sent", Headers::Simple, |request, _| simple(0, request.cookie ^ (7 << 32))),
        ("was not sent", Headers::Extended, |request, disk| {
            done(&Request { cookie: u64::MAX, ..*request }, disk)
        }),
        ("bytes without a request", Headers::Simple, |request, disk| {
            let bytes = vec![1; request.len as usize + 4];
            data(request, disk, request.offset, &bytes, 0)
        }),
        ("simple reply where the protocol", Headers::Structured, |request, _| {
            simple(0, request.cookie)
        }),
        ("simple reply where the protocol", Headers::Extended, |request, _| {
            simple(5, request.cookie)
        }),
        ("no reply", Headers::Simple, |request, disk| {
            piece(
                request,
                &Disk {
                    headers: Headers::Structured,
                    bytes: Vec::new(),
                    written: Vec::new(),
                    hasty: None,
                    ..*disk
                },
                0,
                1,
                &[],
            )
        }),
        ("names 512", Headers::Extended, |request, disk| {
            done(&Request { offset: 512, ..*request }, disk)
        }),
        ("do not answer", Headers::Structured, |request, disk| {
            data(request, disk, request.offset + request.len, &[1; 512], 1)
        }),
        ("do not answer", Headers::Structured, |request, disk| {
            data(request, disk, u64::MAX, &[1; 512], 1)
        }),
        ("do not answer", Headers::Structured, |request, disk| {
            let one = data(request, disk, request.offset, &vec![1; request.len as usize], 0);
            [one.clone(), one].concat()
        }),
        ("answers a request of", Headers::Structured, |request, disk| {
            data(request, disk, request.offset, &vec![1; request.len as usize + 1], 1)
        }),
        ("ends after 512 of", Headers::Structured, |request, disk| {
            data(request, disk, request.offset, &[1; 512], chunk::DONE)
        }),
        ("ends after 0 of", Headers::Extended, done),
        ("does not answer this request", Headers::Structured, |request, disk| {
            piece(request, disk, 77, 1, &[0; 12])
        }),
        ("error of 5 bytes", Headers::Structured, |request, disk| {
            piece(request, disk, chunk::ERROR, 1, &[0; 5])
        }),
        ("longer than the error", Headers::Structured, |request, disk| {
            piece(request, disk, chunk::ERROR, 1, &[0, 0, 0, 5, 1, 0, 65])
        }),
    ];
    // The cases run in parallel, because each client waits for its server most of the time.
    std::thread::scope(|scope| {
        for (says, headers, lie) in lies {
            scope.spawn(move || ends_in_an_error(says, headers, lie));
        }
    });
}

/// Reads from a server that answers wrongly, then from the same server when it answers correctly.
fn ends_in_an_error(says: &'static str, headers: Headers, lie: Lie) {
    let honest = Arc::new(AtomicBool::new(false));
    let is_honest = honest.clone();
    let answer = move |_, request: &Request, disk: &mut Disk| {
        Some(if is_honest.load(Ordering::SeqCst) {
            good(request, disk)
        } else {
            lie(request, disk)
        })
    };
    let server = Server::start(headers, |_, _| (), script(answer));
    let connections = server.connections.clone();
    // The error names the wrong answer: the client has not waited for its timeout.
    on_image(&server, TALKING, async move |store| {
        let mut error = store.read(Segments::buffer(4096), 4096).await.1;
        if says.contains("without a request") && error.is_ok() {
            // The next request detects an error behind a correct answer.
            error = store.read(Segments::buffer(4096), 4096).await.1;
            if error.is_ok() {
                let connections = connections.load(Ordering::SeqCst);
                assert!(connections > 1, "{says}: the connection is kept");
                return;
            }
        }
        let error = error.expect_err(says).to_string();
        assert!(error.contains(says), "{says}: {error}");
        honest.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        loop {
            let (segments, result) = store.read(Segments::buffer(4096), 4096).await;
            match result {
                Ok(_) => return assert!(is_pattern(&segments, 4096)),
                Err(e) => assert!(begun.elapsed() < SOON, "{says}: it never came back: {e}"),
            }
        }
    });
}

/// The client does not allocate lengths that a server sends: chunks of 4 GiB and more, and an
/// endless status.
#[test]
fn huge_lengths_are_not_allocated() {
    std::thread::scope(|scope| {
        for headers in [Headers::Structured, Headers::Extended] {
            for kind in [
                chunk::OFFSET_DATA,
                chunk::ERROR,
                chunk::BLOCK_STATUS,
                chunk::BLOCK_STATUS_EXT,
                chunk::NONE,
            ] {
                scope.spawn(move || a_huge_length_is_not_allocated(headers, kind));
            }
        }
    });
}

fn a_huge_length_is_not_allocated(headers: Headers, kind: u16) {
    let answer = move |_, request: &Request, disk: &mut Disk| {
        let mut bytes = piece(request, disk, kind, 1, &[]);
        let at = bytes.len() - if headers == Headers::Extended { 8 } else { 4 };
        bytes[at..].fill(0xff);
        Some(bytes)
    };
    let server = Server::start(headers, |_, _| (), script(answer));
    on_image(&server, TALKING, async move |store| {
        let error = store.read(Segments::buffer(512), 0).await.1.unwrap_err().to_string();
        assert!(error.contains("answer") || error.contains("error of"), "{error}");
        let error = store.next_data(0).await.unwrap_err().to_string();
        assert!(error.contains("cannot be reached"), "{error}");
    });
}

#[test]
fn errors_of_the_server_are_returned_and_keep_the_connection() {
    let server = Server::start(
        Headers::Structured,
        |_, _| (),
        script(|_, request, disk| {
            let mut error = errno::EIO.to_be_bytes().to_vec();
            error.extend(8u16.to_be_bytes());
            error.extend(b"bad\nluck");
            Some(match request.command {
                cmd::READ if request.offset >= 4096 => {
                    piece(request, disk, chunk::ERROR, 1, &error)
                }
                cmd::TRIM => piece(request, disk, chunk::ERROR, 1, &[0, 0, 0, 95, 0, 0]),
                _ => good(request, disk),
            })
        }),
    );
    let connections = server.connections.clone();
    on_image(&server, LONG, async move |store| {
        let error = store.read(Segments::buffer(512), 4096).await.1.unwrap_err().to_string();
        assert!(error.contains("I/O error (\"bad luck\")"), "{error}");
        store.read(Segments::buffer(512), 0).await.1.unwrap();
        let error = store.discard(0, 4096).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
        assert_eq!(connections.load(Ordering::SeqCst), 1);
    });
}

/// The server sends nothing, or only the beginning of an answer.
///
/// Requests that fail while the server is silent wait for no connection of their own. The client
/// tries to connect in the background, from time to time.
#[test]
fn a_silent_server_costs_bounded_time() {
    /// Number of requests that fail at once, and of connections that the client makes meanwhile.
    const REFUSED: usize = 200;
    const ATTEMPTS: usize = 20;
    let costs_bounded_time = |begins: bool| {
        let (given_up, until_given_up) = channel::<()>();
        let server = Server::start(
            Headers::Simple,
            |_, _| (),
            script(move |_, request, disk| {
                if begins {
                    return Some(good(request, disk)[..20].to_vec());
                }
                let _ = until_given_up.recv();
                None
            }),
        );
        let attempts = server.attempts.clone();
        on_image(&server, SHORT, async move |store| {
            let error = store.read(Segments::buffer(4096), 0).await.1.unwrap_err().to_string();
            assert!(error.contains("cannot be reached"), "{error}");
            let before = attempts.load(Ordering::SeqCst);
            for refused in 0..REFUSED {
                store.read(Segments::buffer(4096), 0).await.1.unwrap_err();
                let made = attempts.load(Ordering::SeqCst) - before;
                assert!(made <= ATTEMPTS, "{made} connections for {refused} requests");
            }
            drop(given_up);
        });
    };
    std::thread::scope(|scope| {
        for begins in [false, true] {
            scope.spawn(move || costs_bounded_time(begins));
        }
    });
}

/// A server closes connections instead of answering, repeatedly. The client sends the requests
/// again, and all answers are right.
#[test]
fn requests_are_repeated_after_lost_connections() {
    let server = Server::start(
        Headers::Structured,
        |_, _| (),
        script({
            let mut requests = 0;
            move |number, request, disk| {
                requests += 1;
                let answer = good(request, disk);
                // None closes the connection without an answer.
                if number < 8 && requests % 5 == 0 { None } else { Some(answer) }
            }
        }),
    );
    let connections = server.connections.clone();
    on_image(&server, LONG, async move |store| {
        for round in 0..20 {
            for at in 0..16 {
                let offset = (round * 16 + at) % 32 * 4096;
                let (segments, result) = store.read(Segments::buffer(32768), offset).await;
                result.unwrap();
                assert!(is_pattern(&segments, offset));
            }
        }
        assert_eq!(connections.load(Ordering::SeqCst), 8);
        store.sync().await.unwrap();
        assert!(store.lost().is_none(), "nothing was written");
    });
}

/// A connection that ends while idle is reconnected at once, so that the next request finds it.
/// This happens only once, because a server may disconnect idle clients.
#[test]
fn an_idle_connection_is_reconnected_once() {
    // The server allows a connection for each reactor, so the client runs on this one.
    let server = Server::start(
        Headers::Structured,
        |_, disk| disk.flags |= wire::export::CAN_MULTI_CONN,
        script(|_, request, disk| Some(good(request, disk))),
    );
    let (connections, idle, path) =
        (server.connections.clone(), server.idle.clone(), server.path());
    let file = open(&server, LONG);
    let executor = Executor::new().unwrap();
    let handle = executor.handle().clone();
    let store = file.storage(&handle).unwrap();
    let test = async move {
        for round in 1..=2 {
            let (segments, result) = store.read(Segments::buffer(4096), 8192).await;
            result.unwrap();
            assert!(is_pattern(&segments, 8192));
            let before = connections.load(Ordering::SeqCst);
            // The server ends this connection, and the next one after its handshake.
            idle.end();
            let start = Instant::now();
            while idle.ended() < 2 * round {
                assert!(start.elapsed() < SOON, "the end was not detected");
                handle.yield_now().await;
            }
            // The client has closed the second connection, and would connect again at once.
            for _ in 0..1000 {
                handle.yield_now().await;
            }
            Server::touch(&path);
            assert_eq!(connections.load(Ordering::SeqCst), before + 2, "the client's and this one");
            idle.serve();
        }
        assert!(store.lost().is_none(), "nothing was written");
    };
    run(&executor, test);
}

/// Data that were acknowledged but not flushed are lost with the connection. The client must not
/// report them as durable.
#[test]
fn unflushed_writes_are_lost_with_the_connection() {
    for flushed in [true, false] {
        let closes = Arc::new(AtomicBool::new(false));
        let now = closes.clone();
        let server = Server::start(
            Headers::Simple,
            |_, _| (),
            script(move |_, request, disk| {
                if now.swap(false, Ordering::SeqCst) { None } else { Some(good(request, disk)) }
            }),
        );
        on_image(&server, LONG, async move |store| {
            store.write(Segments::from_bytes(&[1; 512]), 0, false).await.1.unwrap();
            if flushed {
                store.sync().await.unwrap();
            }
            closes.store(true, Ordering::SeqCst);
            // An unanswered write is sent again, unless earlier writes are lost.
            let write = store.write(Segments::from_bytes(&[2; 512]), 512, false).await.1;
            assert_eq!((write.is_ok(), store.sync().await.is_ok()), (flushed, flushed));
            assert_eq!(store.lost().is_none(), flushed);
            let (segments, result) = store.read(Segments::buffer(512), 0).await;
            result.unwrap();
            assert_eq!(segments.find_difference(0, &Segments::from_bytes(&[1; 512]), 0, 512), None);
            let late = store.write(Segments::from_bytes(&[3; 512]), 0, true).await.1;
            assert_eq!(late.is_ok(), flushed);
            if let Err(e) = late {
                assert!(e.to_string().contains("since the last flush may be lost"), "{e}");
            }
        });
    }
}

/// A server that does not answer a write in time is lost, because it might still execute the write
/// after a later one.
#[test]
fn a_server_silent_during_a_write_is_lost() {
    let (given_up, until_given_up) = channel::<()>();
    let server = Server::start(
        Headers::Simple,
        |_, _| (),
        script(move |_, request, disk| {
            if request.command == cmd::WRITE {
                let _ = until_given_up.recv();
            }
            Some(good(request, disk))
        }),
    );
    on_image(&server, SHORT, async move |store| {
        let error = store.write(Segments::buffer(512), 0, false).await.1.unwrap_err().to_string();
        assert!(error.contains("not answered a write"), "{error}");
        assert!(store.sync().await.is_err() && store.lost().is_some());
        drop(given_up);
    });
}

#[test]
fn an_export_that_changed_is_not_used_after_a_reconnect() {
    let says = Arc::new(Mutex::new(String::new()));
    type Change = fn(&mut Disk);
    let changes: [(&str, Change); 3] = [
        ("has 524288 bytes now", |disk| disk.size = SIZE / 2),
        ("fewer operations", |disk| disk.flags = 1),
        ("fewer operations", |disk| disk.flags |= 2),
    ];
    for (what, change) in changes {
        let server = Server::start(
            Headers::Simple,
            move |number, disk| {
                if number > 1 {
                    change(disk);
                }
            },
            script(
                |number, request, disk| if number == 1 { None } else { Some(good(request, disk)) },
            ),
        );
        let says = says.clone();
        on_image(&server, TALKING, async move |store| {
            let error = store.read(Segments::buffer(512), 0).await.1.unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
            *says.lock().unwrap() = error;
        });
    }
}

#[test]
fn a_server_that_does_not_negotiate_fails_in_time() {
    let path = std::env::temp_dir().join(format!("blockyard-mute-{}", std::process::id()));
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let open = |options| {
        let name = format!("nbd+unix:///?socket={}", path.display());
        let (sender, opened) = channel();
        std::thread::spawn(move || sender.send(Remote::open(&name, true, options).unwrap_err()));
        opened.recv_timeout(HANGS).expect("the client hangs, or has connected")
    };
    // The limit of the client is its own, and the machine may stop in the meantime.
    let error = open(SHORT);
    assert!(error.to_string().contains("does not answer"), "{error}");
    drop(listener);
    let error = open(TALKING);
    assert!(error.to_string().contains("Connection refused"), "{error}");
    std::fs::remove_file(&path).unwrap();
}
