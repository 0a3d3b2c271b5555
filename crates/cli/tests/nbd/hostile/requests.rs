//! Requests with wrong lengths, and clients that disconnect in the middle of a request.

use super::*;
use wire::errno;

#[test]
fn invalid_lengths_are_refused() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    let mut raw = Raw::ready(&disk.socket, Headers::Simple);
    for (command, offset, len) in [
        (cmd::READ, 0, u32::MAX.into()),
        (cmd::READ, u64::MAX, 512),
        (cmd::READ, u64::MAX - 511, 1024),
        (cmd::READ, 1 << 63, 512),
        (cmd::READ, 64 * MB - 1, 2),
        (cmd::READ, 64 * MB, 1),
        (cmd::TRIM, 4096, u32::MAX.into()),
        (cmd::WRITE_ZEROES, u64::MAX - 4095, 4096),
        (cmd::CACHE, 64 * MB, 1),
        (cmd::BLOCK_STATUS, 0, 4096),
        (99, 0, 0),
        (u16::MAX, u64::MAX, u32::MAX.into()),
    ] {
        raw.request(command, offset, len);
        let error = raw.error();
        let range = matches!(error, errno::EINVAL | errno::ENOSPC | errno::EOVERFLOW);
        assert!(range, "command {command} at {offset} of {len}: {error}");
    }
    // The server skips the payload of a refused write, and parses the next request.
    raw.request(cmd::WRITE, 64 * MB - 4096, 8192);
    raw.write(&[0xaa; 8192]);
    assert_eq!(raw.error(), errno::ENOSPC);
    raw.request(cmd::READ, 64 * MB - 4096, 4096);
    assert_eq!(raw.error(), 0);
    assert!(raw.read(4096).iter().all(|b| *b == 0), "a refused write has written");
    // A write of 4 GiB ends the connection.
    raw.request(cmd::WRITE, 0, u32::MAX.into());
    raw.ends();
    let mut raw = Raw::ready(&disk.socket, Headers::Extended);
    raw.request(cmd::WRITE, 0, 1 << 62);
    raw.ends();
    good.is_unharmed();
    ends(disk, ());
}

/// A write whose payload is incomplete writes nothing.
#[test]
fn a_write_without_its_whole_payload_writes_nothing() {
    let (folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    for i in 0..50u64 {
        let mut raw = Raw::ready(&disk.socket, Headers::Structured);
        raw.request(cmd::WRITE, 32 * MB, 2 * MB);
        raw.write(&vec![0xbb; (i * 40_000) as usize]);
        drop(raw);
    }
    good.is_unharmed();
    ends(disk, ());
    let image = std::fs::read(folder.join("disk.img")).unwrap();
    assert!(image[32 << 20..34 << 20].iter().all(|b| *b == 0), "half a write is on the disk");
}

#[test]
fn clients_that_disconnect_during_reads_leave_no_memory_behind() {
    let (_folder, disk) = disk();
    let mut good = Good::new(&disk.socket);
    for i in 0..50usize {
        let mut raw = Raw::ready(&disk.socket, Headers::Simple);
        (0..40).for_each(|n| raw.request(cmd::READ, n * MB, MB));
        raw.read(i * 1000);
        drop(raw);
    }
    good.is_unharmed();
    // All clients are gone, and their memory is freed.
    ends(disk, ());
}

/// A slow client, which sends halves of headers with pauses, is not an error.
#[test]
fn requests_may_arrive_in_pieces() {
    let folder = Folder::new();
    let disk = NbdServer::empty(&folder, 64 * MB, &["--reactors", "1"]);
    let mut other = Good::new(&disk.socket);
    let mut raw = Raw::ready(&disk.socket, Headers::Simple);
    let mut bytes = Vec::new();
    Request { flags: 0, command: cmd::WRITE, cookie: 9, offset: 4096, len: 3000 }
        .put(Headers::Simple, &mut bytes);
    bytes.extend([0xcc; 3000]);
    let mut read = Vec::new();
    Request { flags: 0, command: cmd::READ, cookie: 9, offset: 4095, len: 3002 }
        .put(Headers::Simple, &mut read);
    // The last piece of the write contains the beginning of the read.
    bytes.extend(&read[..9]);
    for piece in bytes.chunks(97) {
        raw.write(piece);
        // The reactor has had an iteration with this piece before it answers another client.
        other.works();
    }
    assert_eq!(raw.error(), 0);
    read[9..].chunks(3).for_each(|piece| raw.write(piece));
    assert_eq!(raw.error(), 0);
    let data = raw.read(3002);
    assert!(data[0] == 0 && data[3001] == 0 && data[1..3001].iter().all(|b| *b == 0xcc));
    ends(disk, raw);
}

/// NBD specification, NBD_CMD_DISC: the server handles the requests before it, however long they
/// are.
#[test]
fn zeroes_before_a_disconnection_are_written_to_their_end() {
    let folder = Folder::new();
    let image = folder.image("disk.img", 5 << 30);
    // Each part of the request waits, so that the disconnection comes before its end.
    let disk = NbdServer::start(&image, folder.join("s"), &["--filter", "delay:write-zeroes=20ms"]);
    let mut good = Raw::ready(&disk.socket, Headers::Simple);
    for offset in [0, 3 << 30, (5 << 30) - 4096] {
        good.request(cmd::WRITE, offset, 4096);
        good.write(&[0xaa; 4096]);
        assert_eq!(good.error(), 0);
    }
    let mut raw = Raw::ready(&disk.socket, Headers::Extended);
    raw.request(cmd::WRITE_ZEROES, 0, 5 << 30);
    raw.request(cmd::DISC, 0, 0);
    let reply = raw.read(32);
    // The type NBD_REPLY_TYPE_NONE: a success.
    assert_eq!((&reply[6..8], wire::u64_at(&reply, 8)), (&[0, 0][..], 7));
    raw.ends();
    for offset in [0, 3 << 30, (5 << 30) - 4096] {
        good.request(cmd::READ, offset, 4096);
        assert_eq!(good.error(), 0);
        assert!(good.read(4096).iter().all(|byte| *byte == 0), "at {offset}");
    }
    disk.daemon.stop();
}
