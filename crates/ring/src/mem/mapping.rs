//! Memory of another process that is mapped into this one.
//!
//! What must hold: memory is unmapped when its last user drops it, and soon afterwards if it is
//! large or a guest's. No thread that serves requests unmaps the memory of a guest, however many
//! regions it has.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::LazyLock;
use std::time::Duration;

use crate::mem::fault::Guard;
use crate::mem::quota::Charge;
use crate::offload::pool::Pool;

/// What ends when the memory is unmapped: its drop does that.
pub(crate) type AfterUnmap = Box<dyn Any + Send + Sync>;

/// One shared mapping. Unmapped on drop.
pub(crate) struct Mapping {
    pub(crate) base: NonNull<u8>,
    pub(crate) map_len: usize,
    pub(crate) fault: Option<Guard>,
    /// The charge on a front end's account, until the memory is unmapped.
    pub(crate) charge: Option<Charge>,
    /// For granted pages (Xen): dropped after the memory is unmapped, which releases the grants.
    pub(crate) release: Option<AfterUnmap>,
}

// SAFETY: a mapping is plain shared memory. All access is volatile or atomic, within checked
// bounds. So sharing the handle between threads adds no access that another process could not make
// anyway.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.fault = None;
        let mut unused = Unused {
            base: self.base.as_ptr() as usize,
            len: self.map_len,
            _charge: self.charge.take(),
            _release: self.release.take(),
        };
        // A front end may have many regions that are not large, and drop all of them at once.
        let is_guests = unused._charge.is_some() && unused._release.is_none();
        if unused.len < LARGE && !is_guests {
            return;
        }
        if let Some(charge) = &mut unused._charge {
            charge.leaves();
        }
        if let Err(refused) = UNMAPPER.run(Box::new(move |()| drop(unused))) {
            (refused.task)(&());
        }
    }
}

/// A mapping that nothing uses. Unmapped on drop.
struct Unused {
    base: usize,
    len: usize,
    /// Dropped after the memory is unmapped, as the next field.
    _charge: Option<Charge>,
    _release: Option<AfterUnmap>,
}

impl Drop for Unused {
    fn drop(&mut self) {
        let base = std::ptr::without_provenance_mut(self.base);
        // SAFETY: base and len come from mmap. No pointer into the mapping remains, because every
        // SharedSlice and Segments holds the Arc<Region> that owned it.
        let _ = unsafe { rustix::mm::munmap(base, self.len) };
    }
}

/// Bytes from which a mapping is large: a thread unmaps it. To unmap the touched memory of a guest
/// takes 10 to 20 ms for each GiB, and the last user may be a reactor.
const LARGE: usize = 64 << 20;
/// Name of that thread.
const UNMAPS: &str = "unmap";

static UNMAPPER: LazyLock<Pool> = LazyLock::new(|| Pool::new(UNMAPS, 1, Duration::from_secs(5)));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::memory::Region;
    use crate::testing::waits::until;

    /// Returns the number of mappings of a file.
    fn mappings(name: &str) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(name)).count()
    }

    fn has_unmapper() -> bool {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks.flatten().any(|task| {
            let comm = std::fs::read_to_string(task.path().join("comm"));
            // A thread may end meanwhile.
            comm.is_ok_and(|comm| comm.trim_end() == UNMAPS)
        })
    }

    #[test]
    fn a_thread_unmaps_large_memory() {
        let (small, _file) = Region::memfd("unmap-small", 0, 0, 4096).unwrap();
        drop(small);
        assert_eq!(mappings("unmap-small"), 0);
        let (large, _file) = Region::memfd("unmap-large", 0, 0, LARGE as u64).unwrap();
        assert_eq!(mappings("unmap-large"), 1);
        drop(large);
        until("the thread runs", has_unmapper);
        until("the memory is unmapped", || mappings("unmap-large") == 0);
    }
}
