//! A session's memory table.
//!
//! What must hold: a change is acknowledged only when every running queue uses the new table. After
//! the acknowledgement, the front end uses the added memory, and frees the memory that it has
//! removed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use blockyard_ring::{GuestMemory, MEMORY_SLOTS, MemoryError, MemoryFile, PendingReply, Region};
use vhost::vhost_user::Result;
use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::session::Session;
use super::state::MemoryRegion;
use crate::descriptors;

/// Longest wait for a reactor to make a change. A reactor that takes longer is broken.
const EFFECT_TIME: Duration = Duration::from_secs(10);

impl Session {
    /// Replaces the whole table (SET_MEM_TABLE).
    pub(super) fn set_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
    ) -> Result<()> {
        let (mut memory, mut table) = (GuestMemory::default(), Vec::with_capacity(regions.len()));
        for (region, file) in regions.iter().zip(files) {
            let region = described(region);
            let mapped = self.map(&region, &file).and_then(|region| memory.with(region));
            memory = mapped.map_err(|e| self.unmapped("memory table", &e))?;
            table.push(MemoryRegion { file: kept(file), ..region });
        }
        self.state.memory = table;
        self.replace_memory(memory)
    }

    /// Adds one region (ADD_MEM_REG).
    pub(super) fn add_region(&mut self, region: &VhostUserMemoryRegion, file: File) -> Result<()> {
        let region = described(region);
        if self.may_repeat && self.state.memory.iter().any(|known| known.is_same(&region)) {
            return Ok(());
        }
        if self.memory.regions().len() as u64 >= MEMORY_SLOTS {
            return Err(self.refuse(format_args!("more than {MEMORY_SLOTS} memory regions")));
        }
        let memory = self.map(&region, &file).and_then(|region| self.memory.with(region));
        let memory = memory.map_err(|e| self.unmapped("cannot add a memory region", &e))?;
        self.state.memory.push(MemoryRegion { file: kept(file), ..region });
        self.replace_memory(memory)
    }

    /// Removes one region (REM_MEM_REG).
    pub(super) fn remove_region(&mut self, guest: u64, len: u64) -> Result<()> {
        let is_there = |region: &MemoryRegion| (region.guest, region.size) == (guest, len);
        if self.may_repeat && !self.state.memory.iter().any(is_there) {
            return Ok(());
        }
        let memory = self.memory.without(guest, len);
        let memory =
            memory.map_err(|e| self.refuse(format_args!("cannot remove a memory region: {e}")))?;
        self.state.memory.retain(|region| !is_there(region));
        self.replace_memory(memory)
    }

    /// Maps the memory table of the state, which another session has filled.
    pub(super) fn map_table(&mut self) -> Result<()> {
        let table = std::mem::take(&mut self.state.memory);
        let mut memory = GuestMemory::default();
        for region in &table {
            let Some(file) = &region.file else {
                return Err(self.refuse(format_args!(
                    "memory at {:#x}: its descriptor was not kept, because too few were left",
                    region.guest
                )));
            };
            let mapped = self.map(region, file).and_then(|region| memory.with(region));
            memory = mapped.map_err(|e| self.unmapped("memory table", &e))?;
        }
        self.state.memory = table;
        self.replace_memory(memory)
    }

    fn map(
        &mut self,
        region: &MemoryRegion,
        file: impl AsFd,
    ) -> std::result::Result<Region, MemoryError> {
        let MemoryRegion { guest, user, size, offset, .. } = *region;
        let mapped = self.mapper.map(&file, offset, guest, user, size)?;
        if let Ok(MemoryFile::Disk(name)) = MemoryFile::of(file)
            && !std::mem::replace(&mut self.named_disk, true)
        {
            let what = format_args!(
                "guest memory is in a file on {name}: its page faults may wait for a disk"
            );
            self.device.log.info(self.device.disk.name(), None, what);
        }
        Ok(mapped)
    }

    fn replace_memory(&mut self, memory: GuestMemory) -> Result<()> {
        // With pinned memory, the registration populates all pages, which takes time.
        let _wait = self.export.own_wait();
        let old = std::mem::replace(&mut self.memory, memory);
        self.warn_if_log_is_small();
        self.extend_log(self.state.logged_memory());
        if let Some(pins) = &self.pins {
            pins.replace(&old, &self.memory);
        }
        let changes: Vec<_> =
            self.queues().map(|queue| queue.set_memory(self.memory.clone())).collect();
        self.in_effect(changes)
    }

    /// Waits until all queues have carried out the change.
    pub(super) fn in_effect(
        &self,
        changes: impl IntoIterator<Item = PendingReply<()>>,
    ) -> Result<()> {
        let _wait = self.export.own_wait();
        let deadline = Instant::now() + EFFECT_TIME;
        for change in changes {
            change
                .until(deadline)
                .map_err(|e| self.refuse(format_args!("a queue did not make a change: {e}")))?;
        }
        Ok(())
    }
}

fn described(region: &VhostUserMemoryRegion) -> MemoryRegion {
    MemoryRegion {
        guest: region.guest_phys_addr,
        user: region.user_addr,
        size: region.memory_size,
        offset: region.mmap_offset,
        file: None,
    }
}

/// Returns the descriptor, for storage in the state. Closes it and returns `None` if the process
/// has too few descriptors left. The memory stays mapped without the descriptor.
fn kept(file: File) -> Option<OwnedFd> {
    descriptors::too_few().is_none().then(|| file.into())
}
