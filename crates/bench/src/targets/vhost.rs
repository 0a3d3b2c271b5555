//! A vhost-user-blk server with one request at a time, like a guest's program that waits for each
//! request.
//!
//! In: a socket's path. Out: a [`Target`]. What must hold: a durable write is a write and a FLUSH
//! after it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use blockyard_driver::{Data, Plan, Session, SplitRing, feature, request, status};

use super::{Access, SECTOR, Target};

/// A request that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(60);

pub struct Vhost {
    session: Session<SplitRing>,
    block: u64,
    flushes: bool,
}

impl Vhost {
    pub fn open(path: &Path, access: Access) -> Result<Self> {
        let data_len = u32::try_from(access.largest).context("a request is less than 4 GiB")?;
        let plan = Plan { slots: 1, data_len, ..Plan::default() };
        let session = Session::<SplitRing>::start(path, &plan)?;
        let features = session.link.connection.features;
        let has = |feature| features & feature != 0;
        anyhow::ensure!(!(access.writes && has(feature::READ_ONLY)), "the disk is read-only");
        let block = if has(feature::BLK_SIZE) {
            u64::from(session.link.config.blk_size).max(SECTOR)
        } else {
            SECTOR
        };
        Ok(Vhost { session, block, flushes: has(feature::FLUSH) })
    }

    fn request(&mut self, request: u32, offset: u64, data: Data, bytes: &mut [u8]) -> Result<()> {
        let answer = self.session.queues[0].call(request, offset / SECTOR, data, bytes, LIMIT)?;
        anyhow::ensure!(
            answer == status::OK,
            "request type {request} of {} bytes at offset {offset} was answered with status {answer}",
            bytes.len()
        );
        Ok(())
    }
}

impl Target for Vhost {
    fn size(&self) -> u64 {
        self.session.link.config.capacity_sectors.saturating_mul(SECTOR)
    }

    fn block(&self) -> u64 {
        self.block
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.request(request::IN, offset, Data::FromDevice(bytes.len() as u32), bytes)
    }

    fn write(&mut self, offset: u64, bytes: &mut [u8], durable: bool) -> Result<()> {
        self.request(request::OUT, offset, Data::ToDevice(bytes.len() as u32), bytes)?;
        // Without VIRTIO_BLK_F_FLUSH there is no write cache to be flushed: virtio 1.2, 5.2.6.2.
        if durable && self.flushes {
            self.request(request::FLUSH, 0, Data::None, &mut [])
        } else {
            Ok(())
        }
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        // Stops the rings, as a guest that shuts down does. The server may have ended already.
        let _ = self.session.link.stop();
    }
}
