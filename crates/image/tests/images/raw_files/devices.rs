//! Raw images on block devices: loop devices over files.

use super::*;

/// A loop device over a file, as a block device for a test.
struct Loop {
    device: PathBuf,
    backing: Scratch,
}

impl Loop {
    fn new(len: u64, block: u32) -> Self {
        need_root("setting up a loop device");
        let backing = Scratch::new(len);
        let (block, path) = (block.to_string(), backing.0.to_str().unwrap());
        let device = run("losetup", &["--find", "--show", "--sector-size", &block, path]).into();
        Loop { device, backing }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.device.to_str().unwrap()]);
    }
}

/// A fast zero request uses the device's own zeroing, in whole blocks. If the kernel would have to
/// write zeroes, the request fails, and nothing changes.
#[test]
fn fast_zeroes_of_a_block_device() {
    const LEN: u64 = 4 << 20;
    for block in [512, 4096] {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let device = Loop::new(LEN, block);
            let file = open(&device.device, cache);
            on_image(&file, move |raw| async move {
                put(&raw, 0, &vec![7; LEN as usize]).await;
                let block = u64::from(block);
                let (mib, half) = (1 << 20, block / 2);
                for (offset, len, unmap) in
                    [(0, mib, false), (half, mib, true), (0, mib + half, true), (half, half, true)]
                {
                    let refused = raw.write_zeroes_fast(offset, len, unmap).await.unwrap_err();
                    assert_eq!(
                        refused.kind(),
                        std::io::ErrorKind::Unsupported,
                        "{offset}+{len} {unmap}"
                    );
                }
                assert!(take(&raw, 0, LEN as usize).await.iter().all(|&byte| byte == 7));
                raw.write_zeroes_fast(block, mib, true).await.unwrap();
                let now = take(&raw, 0, LEN as usize).await;
                let zeroes = block as usize..(block + mib) as usize;
                assert!(
                    now.iter().enumerate().all(|(at, &byte)| (byte == 0) == zeroes.contains(&at))
                );
            });
        }
    }
}

#[test]
fn a_block_device_reports_its_size_and_blocks_and_discards() {
    const LEN: u64 = 4 << 20;
    for block in [512, 4096] {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let device = Loop::new(LEN, block);
            let file = open(&device.device, cache);
            assert_eq!((file.size(), file.is_device()), (LEN, true));
            let geometry = file.geometry();
            assert_eq!(
                (geometry.logical_block, geometry.direct_offset),
                (block, block),
                "{geometry:?}"
            );
            let align = if cache.direct() { block } else { 1 };
            assert_eq!(file.alignment().offset_align, align);
            on_image(&file, |raw| async move {
                put(&raw, 0, &vec![1; LEN as usize]).await;
                raw.flush().await.unwrap();
            });
            assert!(device.backing.allocated() >= LEN);
            on_image(&file, |raw| async move {
                // A range from one unaligned sector to another: the device accepts whole blocks
                // only.
                raw.discard(512, LEN - 1024).await.unwrap();
                assert_eq!(take(&raw, 0, 512).await, [1; 512]);
                assert_eq!(take(&raw, LEN - 512, 512).await, [1; 512]);
                assert_eq!(take(&raw, 8192, 512).await, [0; 512]);
                raw.discard(512, 512).await.unwrap();
                raw.flush().await.unwrap();
            });
            assert!(
                device.backing.allocated() <= 128 << 10,
                "{} bytes are left",
                device.backing.allocated()
            );
        }
    }
}

#[test]
fn a_block_device_zeroes_parts_of_its_blocks() {
    const LEN: usize = 1 << 20;
    for block in [512, 4096] {
        for (cache, unmap) in
            [(CacheMode::None, false), (CacheMode::None, true), (CacheMode::Writeback, true)]
        {
            let device = Loop::new(LEN as u64, block);
            let file = open(&device.device, cache);
            on_image(&file, move |raw| async move {
                let mut model = vec![1; LEN];
                put(&raw, 0, &model).await;
                for (sector, sectors) in
                    [(1, 1), (9, 30), (63, 2), (100, 8), (200, 16), (LEN as u64 / 512 - 3, 3)]
                {
                    raw.write_zeroes(sector * 512, sectors * 512, unmap).await.unwrap();
                    model[sector as usize * 512..][..sectors as usize * 512].fill(0);
                    let found = take(&raw, 0, LEN).await;
                    same(&found, &model, 0, &format!("{block}, {cache}, {unmap}, sector {sector}"))
                        .unwrap();
                }
            });
        }
    }
}

proptest! {
    #![proptest_config(cases(40))]

    /// Page cache over 4096-byte blocks, and O_DIRECT with read-modify-write: the device equals the
    /// model.
    #[test]
    fn a_block_device_equals_the_model(asks in asks(256 << 10), direct: bool) {
        let device = Loop::new(256 << 10, 4096);
        let cache = if direct { CacheMode::None } else { CacheMode::Writeback };
        let file = open(&device.device, cache);
        // Discards of partial blocks keep their data, which the model does not know.
        let asks = asks.into_iter().filter(|ask| !matches!(ask, Ask::Discard { .. })).collect();
        let model = on_image(&file, |raw| follow(raw, asks, vec![0; 256 << 10]))?;
        let found = on_image(&file, |raw| async move { take(&raw, 0, 256 << 10).await });
        same(&found, &model, 0, "the device at the end")?;
    }
}

/// Two reactors write sectors of the same 4096-byte blocks, each its own. No write is undone.
#[test]
fn reactors_that_share_blocks_keep_each_others_writes() {
    const BLOCKS: u64 = 4;
    const ROUNDS: u8 = 60;
    let device = Loop::new(1 << 20, 4096);
    let file = open(&device.device, CacheMode::None);
    std::thread::scope(|scope| {
        for reactor in 0..2 {
            let file = &file;
            scope.spawn(move || {
                on_image(file, |raw| write_own_sectors(raw, reactor, BLOCKS * 8, ROUNDS))
            });
        }
    });
    let mut bytes = vec![0; BLOCKS as usize * 4096];
    File::open(&device.device).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    for (sector, found) in bytes.chunks(512).enumerate() {
        let expected = if sector % 4 == 3 { 0 } else { ROUNDS };
        assert!(
            found.iter().all(|&b| b == expected),
            "sector {sector} holds {}, not {expected}",
            found[0]
        );
    }
}

/// Writes every other sector, four in flight, and zeroes each fourth of them in between.
async fn write_own_sectors(raw: Raw, reactor: u64, sectors: u64, rounds: u8) {
    let raw = Rc::new(raw);
    for round in 1..=rounds {
        for group in 0..sectors / 8 {
            let own: Vec<u64> =
                (0..8).map(|i| group * 8 + i).filter(|s| s % 2 == reactor).collect();
            let writes = own.iter().map(|&sector| {
                let raw = raw.clone();
                Box::pin(async move {
                    match sector % 4 {
                        3 => raw.write_zeroes(sector * 512, 512, false).await.unwrap(),
                        _ => put(&raw, sector * 512, &[round; 512]).await,
                    }
                })
            });
            all(writes.collect()).await;
            for &sector in &own {
                let expected = if sector % 4 == 3 { 0 } else { round };
                let found = take(&raw, sector * 512, 512).await;
                assert!(
                    found.iter().all(|&b| b == expected),
                    "sector {sector}: {}, not {expected}",
                    found[0]
                );
            }
        }
    }
}

/// Waits until all futures have ended.
async fn all<F: Future<Output = ()> + Unpin>(mut futures: Vec<F>) {
    std::future::poll_fn(|cx| {
        futures.retain_mut(|f| std::pin::Pin::new(f).poll(cx).is_pending());
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await
}

/// A guest may send any number of discards at once: they run on few threads.
#[test]
fn many_discards_of_a_block_device_start_few_threads() {
    const LEN: u64 = 16 << 20;
    const RANGES: u64 = 256;
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.trim() == "blocking").count()
    };
    let device = Loop::new(LEN, 512);
    let file = open(&device.device, CacheMode::None);
    on_image(&file, move |raw| async move {
        put(&raw, 0, &vec![7; LEN as usize]).await;
        let mut discards: Vec<_> = (0..RANGES)
            .map(|range| {
                let raw = raw.clone();
                Box::pin(
                    async move { raw.discard(range * (LEN / RANGES), LEN / RANGES).await.unwrap() },
                )
            })
            .collect();
        let mut most = 0;
        std::future::poll_fn(|cx| {
            discards.retain_mut(|discard| discard.as_mut().poll(cx).is_pending());
            most = most.max(threads());
            if discards.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        // The number includes threads of tests that run in parallel.
        assert!(most <= 16, "{most} threads at a time for {RANGES} discards");
        assert!(take(&raw, 0, LEN as usize).await.iter().all(|&byte| byte == 0));
    });
}
