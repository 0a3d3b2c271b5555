//! Properties of an image. The fields are those of `qemu-img info --output json`.

use std::path::Path;

use blockyard_image::qcow2::bitmap_directory::{AUTO, BitmapEntry, IN_USE};
use blockyard_image::qcow2::{Compression, Header};
use blockyard_image::tools::Details;
use blockyard_image::{ChainLayer, Format, ImageFile, SECTOR, cow};
use serde::Serialize;

use crate::commands::image::snapshots::SnapshotFields;

/// An image, or a file that belongs to it.
#[derive(Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Info {
    pub children: Vec<Child>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    pub virtual_size: u64,
    pub filename: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    pub format: String,
    pub actual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<FormatFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    pub dirty_flag: bool,
    /// Number of changes in the journal of a server that died. Not a field of QEMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<usize>,
}

#[derive(Serialize)]
pub struct Child {
    pub name: &'static str,
    pub info: Info,
}

#[derive(Serialize)]
#[serde(tag = "type", content = "data", rename_all = "kebab-case")]
pub enum FormatFields {
    File {},
    Qcow2(Qcow2Fields),
    Cow(CowFields),
}

#[derive(Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Qcow2Fields {
    pub compat: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file_raw: Option<bool>,
    pub compression_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy_refcounts: Option<bool>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapFields>,
    pub refcount_bits: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_l2: Option<bool>,
}

#[derive(Serialize)]
pub struct BitmapFields {
    pub flags: Vec<&'static str>,
    pub name: String,
    pub granularity: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CowFields {
    pub version: u32,
    pub alignment: u32,
    pub backing_size: u64,
    pub backing_mtime: u32,
}

impl BitmapFields {
    fn of(bitmap: &BitmapEntry) -> Self {
        let flags = [(IN_USE, "in-use"), (AUTO, "auto")]
            .into_iter()
            .filter(|(bit, _)| bitmap.flags & bit != 0);
        BitmapFields {
            flags: flags.map(|(_, name)| name).collect(),
            name: bitmap.name.clone(),
            // Values above 63 are invalid. Commands that use the bitmap return an error.
            granularity: 1u64.checked_shl(bitmap.granularity_bits.into()).unwrap_or(0),
        }
    }
}

impl Info {
    pub fn of(layer: &ChainLayer, details: &Details) -> anyhow::Result<Self> {
        let main = Child { name: "file", info: Info::of_file(&layer.file)? };
        let mut info = Info {
            virtual_size: layer.size(),
            filename: main.info.filename.clone(),
            format: layer.format.to_string(),
            actual_size: main.info.actual_size,
            children: vec![main],
            ..Info::default()
        };
        if let Some(shared) = layer.qcow2() {
            info.add_qcow2(&shared.header(), details);
        }
        if let Some(shared) = layer.cow() {
            info.add_cow(shared.header());
        }
        Ok(info)
    }

    fn add_qcow2(&mut self, header: &Header, details: &Details) {
        self.cluster_size = Some(header.cluster_size());
        self.add_backing(header.backing.as_deref());
        self.backing_filename_format = header.backing_format.clone();
        self.dirty_flag = header.has_dirty();
        self.snapshots = details.snapshots.iter().map(SnapshotFields::of).collect();
        let is_version_3 = header.version >= 3;
        self.format_specific = Some(FormatFields::Qcow2(Qcow2Fields {
            compat: if is_version_3 { "1.1" } else { "0.10" },
            data_file: header.data_file.clone(),
            data_file_raw: header.has_data_file().then_some(header.raw_data_file()),
            compression_type: match header.compression {
                Compression::Zlib => "zlib",
                Compression::Zstd => "zstd",
            },
            bitmaps: details.bitmaps.iter().map(BitmapFields::of).collect(),
            lazy_refcounts: is_version_3.then_some(header.lazy_refcounts()),
            refcount_bits: header.refcount_bits(),
            corrupt: is_version_3.then_some(header.has_corrupt()),
            extended_l2: is_version_3.then_some(header.extended_l2()),
        }));
    }

    fn add_cow(&mut self, header: &cow::Header) {
        self.add_backing(Some(&header.backing));
        self.backing_filename_format = Some(Format::Raw.to_string());
        self.format_specific = Some(FormatFields::Cow(CowFields {
            version: header.version(),
            alignment: header.alignment,
            backing_size: header.backing_size,
            backing_mtime: header.backing_mtime,
        }));
    }

    fn add_backing(&mut self, name: Option<&str>) {
        let folder = Path::new(&self.filename).parent().unwrap_or(Path::new(""));
        self.full_backing_filename = name.map(|name| folder.join(name).display().to_string());
        self.backing_filename = name.map(str::to_string);
    }

    /// Returns the properties of a file of the host.
    fn of_file(file: &ImageFile) -> anyhow::Result<Self> {
        // The space that an NBD export uses on its server is unknown: 0.
        let blocks =
            file.fd().map(rustix::fs::fstat).transpose()?.map_or(0, |stat| stat.st_blocks as u64);
        Ok(Info {
            // QEMU rounds the length up to whole sectors.
            virtual_size: file.size().next_multiple_of(SECTOR),
            filename: file.path().display().to_string(),
            format: match (file.opened(), file.is_device()) {
                (Some(opened), _) => opened.kind(),
                (None, true) => "host_device",
                (None, false) => "file",
            }
            .into(),
            actual_size: blocks * 512,
            format_specific: Some(FormatFields::File {}),
            ..Info::default()
        })
    }
}
