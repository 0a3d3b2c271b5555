//! A session's memory table.
//!
//! What must hold: a change is acknowledged when every running queue works with the new table. A front end uses new memory
//! as soon as it has the acknowledgement, and takes memory away that it has removed.

use std::error::Error;
use std::fmt::{self, Display};
use std::fs::File;
use std::time::{Duration, Instant};

use blockyard_ring::{Answer, GuestMemory, MEMORY_SLOTS, MemoryError, MemoryFile, Region};
use vhost::vhost_user::Result;
use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::session::Session;

/// The longest wait for a reactor to take a change. A reactor that takes longer is broken.
const EFFECT_TIME: Duration = Duration::from_secs(10);

impl Session {
    /// All memory anew (SET_MEM_TABLE).
    pub(super) fn set_table(&mut self, regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<()> {
        let mut memory = GuestMemory::default();
        for (region, file) in regions.iter().zip(files) {
            let mapped = self.map(region, &file).and_then(|region| memory.with(region));
            memory = mapped.map_err(|e| self.refuse(format_args!("memory table: {}", Causes(&e))))?;
        }
        self.replace_memory(memory)
    }

    /// One region more (ADD_MEM_REG).
    pub(super) fn add_region(&mut self, region: &VhostUserMemoryRegion, file: &File) -> Result<()> {
        if self.memory.regions().len() as u64 >= MEMORY_SLOTS {
            return Err(self.refuse(format_args!("more than {MEMORY_SLOTS} memory regions")));
        }
        let memory = self.map(region, file).and_then(|region| self.memory.with(region));
        let memory = memory.map_err(|e| self.refuse(format_args!("adding memory: {}", Causes(&e))))?;
        self.replace_memory(memory)
    }

    /// One region less (REM_MEM_REG).
    pub(super) fn remove_region(&mut self, guest: u64, len: u64) -> Result<()> {
        let memory = self.memory.without(guest, len);
        let memory = memory.map_err(|e| self.refuse(format_args!("removing memory: {e}")))?;
        self.replace_memory(memory)
    }

    fn map(&mut self, region: &VhostUserMemoryRegion, file: &File) -> std::result::Result<Region, MemoryError> {
        let (guest, user) = (region.guest_phys_addr, region.user_addr);
        let mapped = self.export.mapper.map(file, region.mmap_offset, guest, user, region.memory_size)?;
        if let Ok(MemoryFile::Disk(name)) = MemoryFile::of(file)
            && !std::mem::replace(&mut self.named_disk, true)
        {
            let what = format_args!("guest memory is in a file on {name}: its page faults may wait for a disk");
            self.device.log.info(self.device.disk.name(), None, what);
        }
        Ok(mapped)
    }

    fn replace_memory(&mut self, memory: GuestMemory) -> Result<()> {
        // Pinned memory is filled here.
        let _wait = self.export.own_wait();
        let old = std::mem::replace(&mut self.memory, memory);
        if let Some(pins) = &self.pins {
            pins.replace(&old, &self.memory);
        }
        let changes: Vec<_> = self.queues().map(|queue| queue.set_memory(self.memory.clone())).collect();
        self.in_effect(changes)
    }

    /// Waits until queues have taken a change.
    pub(super) fn in_effect(&self, changes: impl IntoIterator<Item = Answer<()>>) -> Result<()> {
        let _wait = self.export.own_wait();
        let deadline = Instant::now() + EFFECT_TIME;
        for change in changes {
            change.until(deadline).map_err(|e| self.refuse(format_args!("a queue was not changed: {e}")))?;
        }
        Ok(())
    }
}

/// An error and its causes on one line.
pub(super) struct Causes<'a>(pub &'a dyn Error);

impl Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self.0, f)?;
        match self.0.source() {
            Some(cause) => write!(f, ": {}", Causes(cause)),
            None => Ok(()),
        }
    }
}
