//! Front ends without a guest: QEMU's block layer, and the blkio crate.

use std::path::{Path, PathBuf};

use blkio::{Blkio, Blkioq, MemoryRegion, ReqFlags};

use crate::common::{Folder, allocated, md5, tool};
use crate::fixture::{GuestFixture, Statistics};

const MIB: u64 = 1 << 20;

#[test]
fn qemu_img_converts_compares_and_loads() {
    let mut fixture = GuestFixture::new(16 * MIB, &["--queues", "2"]);
    let source = random_image(&fixture.folder, 16 * MIB);
    let disk =
        format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", fixture.socket.display());
    let file = format!("driver=raw,file.driver=file,file.filename={}", source.display());

    let convert = ["convert", "-n", "--image-opts", &file, "--target-image-opts", &disk];
    tool("qemu-img", convert).good();
    tool("qemu-img", ["compare", "--image-opts", &file, &disk]).good();
    assert_eq!(md5(&source), md5(&fixture.image), "qemu-img wrote something else");

    let bench = |write: &[&str]| {
        let arguments = ["bench", "-c", "4000", "-d", "32", "-s", "4096", "-S", "20480"];
        tool("qemu-img", arguments.iter().chain(write).chain(&["--image-opts", &disk])).good()
    };
    bench(&[]);
    bench(&["-w", "--pattern", "90", "--flush-interval", "500"]);
    let written = std::fs::read(&fixture.image).unwrap();
    let original = std::fs::read(&source).unwrap();
    let mut new = 0;
    for (now, before) in written.chunks(4096).zip(original.chunks(4096)) {
        let is_new = now == [90; 4096];
        assert!(is_new || now == before, "a block is neither what it was nor what qemu-img wrote");
        new += usize::from(is_new);
    }
    // Steps of five blocks, modulo 4096 blocks, visit each block once.
    assert_eq!(new, 4000);
    assert!(Statistics(fixture.stop()).figure("flush", "requests") > 0);
}

/// Creates a file of random bytes.
fn random_image(folder: &Folder, bytes: u64) -> PathBuf {
    let path = folder.join("random");
    let mut random = std::io::Read::take(std::fs::File::open("/dev/urandom").unwrap(), bytes);
    std::io::copy(&mut random, &mut std::fs::File::create(&path).unwrap()).unwrap();
    path
}

#[test]
fn libblkio_writes_reads_flushes_and_discards() {
    let mut fixture = GuestFixture::new(8 * MIB, &[]);
    let mut client = Client::connect(&fixture.socket);
    assert_eq!(client.blkio.get_u64("capacity").unwrap(), 8 * MIB);

    let bytes = std::fs::read(random_image(&fixture.folder, MIB)).unwrap();
    client.memory(&bytes);
    let base = client.region.addr as *const u8;
    // 16 requests of 64 KiB at once, in descending order of offsets.
    for i in 0..16 {
        let (from, to) = ((i as u64) << 16, 4 * MIB - ((i as u64 + 1) << 16));
        client.queue.write(to, base.wrapping_add(from as usize), 1 << 16, i, ReqFlags::empty());
    }
    client.complete(16);
    client.queue.flush(100, ReqFlags::empty());
    client.complete(1);
    let image = std::fs::read(&fixture.image).unwrap();
    let expected: Vec<u8> = bytes.chunks(1 << 16).rev().flatten().copied().collect();
    let place = 3 * MIB as usize..4 * MIB as usize;
    assert!(image[place.clone()] == expected, "the image holds other bytes than were written");

    client.memory(&vec![0; MIB as usize]);
    client.queue.read(3 * MIB, base.cast_mut(), MIB as usize, 0, ReqFlags::empty());
    client.complete(1);
    assert!(client.memory_now() == expected, "other bytes are read than were written");

    let before = allocated(&fixture.image);
    client.queue.discard(3 * MIB, MIB / 2, 0, ReqFlags::empty());
    client.queue.write_zeroes(3 * MIB + MIB / 2, MIB / 2, 1, ReqFlags::empty());
    client.complete(2);
    let after = allocated(&fixture.image);
    assert!(
        after + MIB / 2 <= before,
        "a discard of {} bytes gave back {} to {after}",
        MIB / 2,
        before
    );
    assert!(std::fs::read(&fixture.image).unwrap()[place].iter().all(|b| *b == 0));

    // A read after the end completes without data, and the next request works.
    client.memory(&[5; 4096]);
    client.queue.read(8 * MIB, base.cast_mut(), 4096, 7, ReqFlags::empty());
    client.complete(1);
    assert!(
        client.memory_now()[..4096].iter().all(|b| *b == 5),
        "a read beyond the end brought data"
    );
    client.queue.read(3 * MIB, base.cast_mut(), 4096, 8, ReqFlags::empty());
    client.complete(1);
    assert!(client.memory_now()[..4096].iter().all(|b| *b == 0), "nothing was read");
    drop(client);
    let statistics = Statistics(fixture.stop());
    let errors = ["read", "write", "flush", "discard", "write-zeroes"]
        .map(|kind| statistics.figure(kind, "errors"));
    assert_eq!(
        errors,
        [1, 0, 0, 0, 0],
        "of reads, writes, flushes, discards, zeroes: the one beyond the end"
    );
}

/// Checks how libblkio reports a failed request. QEMU reports the same.
#[test]
fn libblkio_reports_errors() {
    let mut fixture =
        GuestFixture::new(16 * MIB, &["--filter", "error:read=1,write=1,range=1048576-2097152"]);
    let disk =
        format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", fixture.socket.display());
    for (command, fails) in [
        ("write -P 7 0 64k", false),
        ("read -P 7 0 64k", false),
        ("read 1M 4k", true),
        ("write 1M 4k", true),
        ("read -P 0 2M 64k", false),
    ] {
        let done = tool("qemu-io", ["--image-opts", "-c", command, &disk]);
        let said = format!("{}{}", done.out, done.err);
        assert_eq!(said.contains("failed: Input/output error"), fails, "{command}: {said}");
        assert_eq!(done.status.success(), !fails, "{command}: {said}");
    }
    fixture.stop();
}

struct Client {
    queue: Blkioq,
    blkio: Blkio,
    region: MemoryRegion,
    /// The memory region as a file too, because the tests may not access raw memory.
    file: std::fs::File,
}

impl Client {
    fn connect(socket: &Path) -> Self {
        let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
        blkio.set_str("path", socket.to_str().unwrap()).unwrap();
        blkio.connect().unwrap();
        blkio.set_i32("num-queues", 1).unwrap();
        let mut started = blkio.start().unwrap();
        let region = blkio.alloc_mem_region(MIB as usize).unwrap();
        blkio.map_mem_region(&region).unwrap();
        let path = format!("/proc/self/fd/{}", region.fd);
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        Client { queue: started.queues.remove(0), blkio, region, file }
    }

    /// Writes to the start of the memory.
    fn memory(&self, bytes: &[u8]) {
        std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, 0).unwrap();
    }

    fn memory_now(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.len];
        std::os::unix::fs::FileExt::read_exact_at(&self.file, &mut bytes, 0).unwrap();
        bytes
    }

    /// Waits for `count` completions. (Their results are readable only by `unsafe` code. Tests
    /// check the data and the server's statistics instead.)
    #[track_caller]
    fn complete(&mut self, count: usize) {
        let mut space: Vec<_> =
            std::iter::repeat_with(std::mem::MaybeUninit::uninit).take(count).collect();
        let mut limit = crate::common::SOON;
        assert_eq!(self.queue.do_io(&mut space, count, Some(&mut limit), None).unwrap(), count);
    }
}
