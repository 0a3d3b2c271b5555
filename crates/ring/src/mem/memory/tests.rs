//! Tests of guest memory: bounds, holes, truncated files.

use super::*;
use crate::testing::{own_process, waits};

fn region(guest: u64, len: u64) -> Region {
    Region::memfd("test", guest, guest + (1 << 40), len).unwrap().0
}

#[test]
fn regions_are_sorted_and_overlaps_are_refused() {
    let memory = GuestMemory::default().with(region(0x4000, 0x1000)).unwrap();
    let memory = memory.with(region(0, 0x4000)).unwrap();
    assert_eq!(memory.regions()[0].guest(), 0);
    for (guest, len) in [(0x3fff, 1), (0, 0x4001), (0x4fff, 2), (0x4000, 0x1000)] {
        assert!(
            matches!(memory.with(region(guest, len)), Err(MemoryError::Overlap { .. })),
            "{guest:#x}"
        );
    }
    assert!(matches!(memory.without(0, 0x1000), Err(MemoryError::NoSuchRegion { .. })));
    assert_eq!(memory.without(0, 0x4000).unwrap().regions().len(), 1);
}

#[test]
fn addresses_are_found_among_many_regions_in_any_order() {
    let mut memory = GuestMemory::default();
    // Regions of 4 KiB, with a hole after every third one.
    let starts: Vec<u64> = (1..100).map(|n| 0x1000 * (n + n / 3)).collect();
    for start in starts.iter().rev() {
        memory = memory.with(region(*start, 0x1000)).unwrap();
    }
    let mut addr = 0;
    for _ in 0..20_000 {
        addr = (addr + 0x5_4321) % (0x1000 * 140);
        let want = starts.iter().position(|start| (*start..*start + 0x1000).contains(&addr));
        let found =
            memory.find(addr, 1).map(|(index, offset)| (memory.regions[index].guest(), offset));
        assert_eq!(found, want.map(|at| (starts[at], addr - starts[at])), "{addr:#x}");
    }
    let fewer = memory.without(starts[98], 0x1000).unwrap();
    assert!(memory.find(starts[98], 1).is_some() && fewer.find(starts[98], 1).is_none());
}

#[test]
fn a_truncated_file_reads_as_zeroes_from_then_on() {
    let (region, fd) = Region::memfd("test", 0, 0, 0x3000).unwrap();
    let memory =
        GuestMemory::default().with(region).unwrap().with(self::region(0x3000, 0x1000)).unwrap();
    let (slice, other) =
        (memory.slice(0, 0x3000, 1).unwrap(), memory.slice(0x3000, 16, 1).unwrap());
    slice.write(0x2ffc, b"good");
    other.write(0, b"safe");
    rustix::fs::ftruncate(&fd, 0x1000).unwrap();
    // The handler also catches accesses by other threads.
    std::thread::scope(|s| s.spawn(move || assert_eq!(slice.copy_out(0x2ffc), [0; 4])).join())
        .unwrap();
    memory.write_byte(0x2000, 7).unwrap();
    assert_eq!(memory.slice(0x2000, 1, 1).unwrap().copy_out(0), [7]);
    assert_eq!(&other.copy_out(0), b"safe");
}

/// If the report of the truncation waited for the reader, the child would not end.
#[test]
fn a_truncated_file_waits_for_no_reader_of_standard_error() {
    const NAME: &str = "mem::memory::tests::a_truncated_file_waits_for_no_reader_of_standard_error";
    const CHILD: &str = "BLOCKYARD_TEST_TRUNCATED";
    if std::env::var_os(CHILD).is_some() {
        let (region, fd) = Region::memfd("test", 0, 0, 0x1000).unwrap();
        rustix::fs::ftruncate(&fd, 0).unwrap();
        assert_eq!(Arc::new(region).slice().copy_out(0), [0; 4]);
        std::process::exit(7);
    }
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", NAME, "--test-threads=1"]).env(CHILD, "1");
    let mut child = child.stdout(std::process::Stdio::null()).stderr(writer).spawn().unwrap();
    let status = waits::end(&mut child, "it reports the truncation");
    assert_eq!(status.code(), Some(7));
}

/// File systems of large pages make the mapping longer than the file.
#[test]
fn nothing_behind_the_end_of_the_file_is_populated() {
    let (mut region, fd) = Region::memfd("test", 0, 0, 0x4000).unwrap();
    rustix::fs::ftruncate(&fd, 0x1000).unwrap();
    region.len = 0x800;
    region.populate().unwrap();
    assert!(rustix::fs::fstat(&fd).unwrap().st_blocks > 0);
}

/// Returns the resident bytes and the number of mappings of a part of this process's memory.
fn mapped(span: std::ops::Range<usize>) -> (usize, usize) {
    let (mut resident, mut mappings, mut inside) = (0, 0, false);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let word = line.split(' ').next().unwrap();
        if let Some((start, end)) = word.split_once('-') {
            let (start, end) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16));
            inside = start.unwrap() >= span.start && end.unwrap() <= span.end;
            mappings += usize::from(inside);
        } else if inside && word == "Rss:" {
            let kib = line.split_whitespace().nth(1).unwrap();
            resident += kib.parse::<usize>().unwrap() << 10;
        }
    }
    (resident, mappings)
}

/// Another thread of the process could map memory in the place of the region.
#[test]
fn accesses_to_lost_memory_use_a_bounded_amount_of_memory() {
    own_process::run(|| {
        let (region, fd) = Region::memfd("test", 0, 0, 1 << 40).unwrap();
        let span = region.span();
        let memory = GuestMemory::default().with(region).unwrap();
        rustix::fs::ftruncate(&fd, 0).unwrap();
        // Each page of 128 MiB, and pages far from each other.
        for page in 0..32_768 {
            memory.write_byte(page * 4096, 7).unwrap();
        }
        for part in 0..1000 {
            memory.write_byte((1 << 39) + part * (1 << 20), 7).unwrap();
        }
        memory.write_byte((1 << 40) - 1, 7).unwrap();
        let (resident, mappings) = mapped(span.clone());
        assert!(resident <= 64 << 20, "{resident} bytes are resident");
        assert!(mappings <= 2 * 256 + 1, "{mappings} mappings");
        // The file cannot come back.
        rustix::fs::ftruncate(&fd, 1 << 40).unwrap();
        assert_eq!(memory.slice(1 << 38, 8, 8).unwrap().copy_out(0), [0; 8]);
        drop(memory);
        // A thread unmaps it.
        waits::until("it is unmapped", || mapped(span.clone()) == (0, 0));
    });
}

#[test]
fn lost_memory_raises_its_alarm_and_the_kernel_transfers_no_data() {
    use crate::{Executor, Mapper, MemoryAlarm, Segments, UringFile};
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let event = Arc::new(rustix::event::eventfd(0, flags).unwrap());
    let alarm = Arc::new(MemoryAlarm::new(event.clone()));
    let mapper = Mapper::new(false).with_alarm(alarm.clone());
    let memfd = |len| {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        fd
    };
    let (lost, kept) = (memfd(1 << 20), memfd(1 << 20));
    let memory = GuestMemory::default()
        .with(mapper.map(&lost, 0, 0, 0, 1 << 20).unwrap())
        .unwrap()
        .with(mapper.map(&kept, 0, 1 << 20, 1 << 20, 1 << 20).unwrap())
        .unwrap();
    let memory = std::rc::Rc::new(memory);
    memory.write_byte(0, 1).unwrap();
    memory.write_byte(1 << 20, 1).unwrap();
    rustix::fs::ftruncate(&lost, 0).unwrap();
    let executor = Executor::new().unwrap();
    let file = UringFile::new(executor.handle(), Arc::new(memfd(1 << 20))).unwrap();
    let fault = |outcome: std::io::Result<usize>| outcome.unwrap_err().raw_os_error();
    waits::block_on(&executor, async move {
        let transfer = async |addr, writes| {
            let mut segments = Segments::default();
            segments.reset(&memory);
            segments.push_guest(addr, 8192).unwrap();
            match writes {
                true => file.write(segments, 0, false).await.1,
                false => file.read(segments, 0).await.1,
            }
        };
        // Before and after this process has seen that the memory is lost.
        for is_raised in [false, true] {
            assert_eq!(fault(transfer(0x80000, false).await), Some(libc::EFAULT));
            assert_eq!(fault(transfer(0x80000, true).await), Some(libc::EFAULT));
            assert_eq!(transfer(1 << 20, true).await.unwrap(), 8192);
            assert_eq!(transfer(1 << 20, false).await.unwrap(), 8192);
            assert_eq!(alarm.is_raised(), is_raised);
            memory.write_byte(0, 1).unwrap();
        }
    })
    .unwrap();
    let mut count = [0; 8];
    rustix::io::read(&*event, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
}

#[test]
fn threads_that_lose_memory_do_not_disturb_other_mappings() {
    std::thread::scope(|s| {
        for number in 0..4u8 {
            s.spawn(move || {
                for _ in 0..10 {
                    let (lost, fd) = Region::memfd("test", 0, 0, 1 << 30).unwrap();
                    let kept = region(1 << 30, 1 << 20);
                    let memory = GuestMemory::default().with(lost).unwrap().with(kept).unwrap();
                    rustix::fs::ftruncate(&fd, 0).unwrap();
                    let pages = (0..256).map(|page| page * 4096);
                    for at in pages.clone() {
                        memory.write_byte((1 << 30) + at, number).unwrap();
                        memory.write_byte(at * 1000, 255).unwrap();
                    }
                    for at in pages {
                        let slice = memory.slice((1 << 30) + at, 1, 1).unwrap();
                        assert_eq!(slice.copy_out(0), [number]);
                    }
                }
            });
        }
    });
}

#[test]
fn more_mappings_than_a_block_of_the_fault_table_may_fault() {
    let regions: Vec<_> = (0..200).map(|_| Region::memfd("test", 0, 0, 0x1000).unwrap()).collect();
    for (region, fd) in regions {
        rustix::fs::ftruncate(&fd, 0).unwrap();
        let memory = GuestMemory::default().with(region).unwrap();
        assert_eq!(memory.slice(0, 8, 8).unwrap().copy_out(0), [0; 8]);
    }
}

#[test]
fn slices_stay_inside_one_region_and_survive_its_removal() {
    let memory = GuestMemory::default().with(region(0x1000, 0x1000)).unwrap();
    assert!(memory.slice(0xfff, 1, 1).is_err());
    assert!(memory.slice(0x1fff, 2, 1).is_err());
    assert!(memory.slice(u64::MAX, 2, 1).is_err());
    assert!(memory.slice(0x1001, 2, 2).is_err());
    let slice = memory.slice(0x1800, 16, 16).unwrap();
    let memory = memory.without(0x1000, 0x1000).unwrap();
    assert!(memory.regions().is_empty());
    slice.store_u32(4, 0x0102_0304, Ordering::Relaxed);
    assert_eq!(slice.copy_out::<4>(4), [4, 3, 2, 1]);
}

#[test]
fn pieces_cross_adjacent_regions_and_stop_at_holes() {
    let memory = GuestMemory::default()
        .with(region(0, 0x1000))
        .unwrap()
        .with(region(0x1000, 0x1000))
        .unwrap();
    let mut lens = Vec::new();
    memory.pieces(0xf00, 0x200, |_, len| lens.push(len)).unwrap();
    assert_eq!(lens, [0x100, 0x100]);
    assert!(memory.pieces(0x1f00, 0x200, |_, _| ()).is_err());
}

#[test]
fn a_file_shorter_than_its_region_is_refused() {
    let fd = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    assert!(matches!(
        Region::map(&fd, 0, 0, 0, 8192),
        Err(MemoryError::FileTooShort { need: 8192, have: 4096 })
    ));
}

#[test]
fn a_lack_of_this_process_differs_from_a_fault_of_the_front_end() {
    use rustix::io::Errno;
    let map = |e: Errno| MemoryError::Map { len: 1, source: e.into() };
    let own = crate::Exceeded::Own { bytes: 1, mappings: 1 };
    for lack in [map(Errno::NOMEM), map(Errno::MFILE), MemoryError::Exceeded { len: 1, why: own }] {
        assert!(lack.is_lack(), "{lack}");
    }
    let short = MemoryError::FileTooShort { need: 2, have: 1 };
    for fault in [short, MemoryError::Sealed, map(Errno::PERM), map(Errno::FAULT)] {
        assert!(!fault.is_lack(), "{fault}");
    }
}

#[test]
fn segments_name_their_guest_addresses_across_regions() {
    let memory = std::rc::Rc::new(
        GuestMemory::default()
            .with(region(0x1000, 0x1000))
            .unwrap()
            .with(region(0x2000, 0x3000))
            .unwrap(),
    );
    let mut segments = crate::Segments::default();
    assert!(!segments.guest_ranges(|_, _| panic!("no memory")));
    segments.reset(&memory);
    for (addr, len) in [(0x1f00, 0x300), (0x4000, 0x10), (0x4010, 0x20), (0x1000, 1)] {
        segments.push_guest(addr, len).unwrap();
    }
    let mut pages = Vec::new();
    assert!(segments.guest_ranges(|addr, len| pages.extend((addr..addr + len).step_by(0x10))));
    pages.sort_unstable();
    let expected = (0x1f00..0x2200).step_by(0x10).chain((0x4000..0x4030).step_by(0x10));
    assert_eq!(pages, [0x1000].into_iter().chain(expected).collect::<Vec<u64>>());
}
