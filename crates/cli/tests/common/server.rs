//! A disk on a socket, served by the test's own process: for snapshots, commits, streams and
//! resizes. Tests measure their pauses.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use blockyard_disk::{Disk, DiskOptions, LocalDisk, OpKind, SnapshotOptions, Source, WorkError};
use blockyard_export::vhost_user::{QueueShape, SecondClient, Tuning, VhostUser};
use blockyard_export::{Export, Listener, PollMode, Reactors, STOP_TIME};
use blockyard_image::{CacheMode, ChainOptions};

/// One disk on a socket.
pub struct Server {
    pub disk: Arc<Disk>,
    export: VhostUser,
    reactors: Arc<Reactors>,
}

impl Server {
    pub fn start(image: &Path, socket: &Path, filters: &[&str]) -> Self {
        let reactors = Arc::new(Reactors::start(2, &[]).unwrap());
        let (name, serial) = ("live".to_string(), "live".to_string());
        let filters = filters.iter().map(|f| f.parse().unwrap()).collect();
        let options = DiskOptions {
            name,
            serial,
            read_only: false,
            cache: CacheMode::None,
            filters,
            on_enospc: Default::default(),
        };
        let disk = Arc::new(Disk::new(options, Source::open(&ChainOptions::new(image)).unwrap()));
        let (shape, poll) = (QueueShape { queues: 2, size: 256 }, PollMode::Auto);
        let tuning = Tuning {
            poll,
            in_band: false,
            pin_memory: false,
            any_memory_file: false,
            second_client: SecondClient::Wait,
        };
        let listener = Listener::bind(socket).unwrap();
        let export =
            VhostUser::start(disk.clone(), listener, shape, tuning, reactors.clone()).unwrap();
        Server { disk, export, reactors }
    }

    pub fn snapshot(&self, overlay: PathBuf) -> Result<(), WorkError> {
        self.disk.snapshot(&SnapshotOptions::new(overlay))
    }

    /// Returns how many writes are answered.
    pub fn writes(&self) -> u64 {
        let of_reactor = self.reactors.all().filter_map(|reactor| {
            let disk = self.disk.clone();
            let statistics = reactor.ask(move |handle, reply| {
                reply.send(LocalDisk::known(handle, &disk).map(|served| served.statistics()));
            });
            Some(statistics??.summary(OpKind::Write)?.requests)
        });
        of_reactor.sum()
    }

    /// Grows the image, and tells the guest.
    pub fn grow(&mut self, size: u64) -> Result<(), WorkError> {
        self.disk.grow(size)?;
        assert_eq!(self.disk.refresh_capacity().unwrap(), Some(size));
        self.export.resize();
        Ok(())
    }

    /// Ends the server as the program does at SIGTERM.
    pub fn end(mut self) {
        self.export.stop(Instant::now() + STOP_TIME);
        assert!(blockyard_export::close(&self.disk, &self.reactors), "the disk cannot be closed");
    }
}
