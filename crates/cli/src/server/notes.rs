//! What a server notes of disks that could not be opened: in its list, and by an event for each new
//! error.

use blockyard_control::events::What;
use blockyard_control::types::FailedDisk;

use super::Server;
use crate::config::Config;
use crate::disks::book::Entry;
use crate::options::disk::DiskArgs;

impl Server {
    /// Notes a disk of the configuration that could not be opened.
    pub fn note_unopened(&self, args: &DiskArgs, error: &str) {
        if self.unopened.note(args, error) {
            let (disk, image) = (args.name(), args.image.display().to_string());
            self.events.publish(What::DiskFailed { disk, image, error: error.into() });
        }
    }

    /// Notes a disk that has ended by an error, if the configuration has it.
    pub fn note_ended(&self, entry: &Entry, error: &str) {
        if !entry.by_api {
            self.note_unopened(&entry.args, error);
        }
    }

    /// Notes the disks that a reload could not open. Forgets those that the configuration lacks.
    pub fn note_reloaded(&self, config: &Config, failed: &[FailedDisk]) {
        let names = config.disks.iter().map(DiskArgs::name).collect();
        self.unopened.retain(&names);
        for FailedDisk { disk, error } in failed {
            let args = config.disks.iter().find(|args| args.name() == *disk);
            // The old configuration of a changed disk may be served, or it is still being opened.
            if let Some(args) = args.filter(|_| self.book.find(disk).is_none()) {
                self.note_unopened(args, error);
            }
        }
    }
}
