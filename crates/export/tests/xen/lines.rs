//! Collects the warnings of the log, by disk.

use std::fmt::Debug;
use std::sync::{Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Disk and text of each warning so far.
static LINES: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// Starts to collect the warnings of this process.
pub fn keep() {
    static KEPT: OnceLock<()> = OnceLock::new();
    KEPT.get_or_init(|| tracing::subscriber::set_global_default(Keeper).unwrap());
}

/// Returns the warnings about a disk.
pub fn of(disk: &str) -> Vec<String> {
    let lines = LINES.lock().unwrap();
    lines.iter().filter(|(of, _)| of == disk).map(|(_, text)| text.clone()).collect()
}

struct Keeper;

#[derive(Default)]
struct Fields {
    disk: String,
    message: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "disk" {
            self.disk = value.into();
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        }
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        LINES.lock().unwrap().push((fields.disk, fields.message));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
