//! Parameters of a new image, from the options of `create`, `convert` and others.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use blockyard_image::qcow2::{Compression, CreateOptions, Preallocation};
use blockyard_image::tools::NewImage;
use blockyard_image::{Chain, ChainOptions, Format, names_a_path};
use blockyard_storage::{ErrorKind, StorageError, StorageScheme, scheme_of};

use super::FolderArgs;
use super::settings::Settings;

/// Minimum cluster size in bytes at which overlays get extended L2 entries by default. A subcluster
/// has at least 2 KiB then.
const MIN_EXTENDED_CLUSTER: u64 = 64 << 10;

/// A backing file, as the command line names it.
#[derive(Clone, Debug)]
pub struct Backing {
    /// The backing file's name that is stored in the header of the new image.
    pub name: String,
    pub format: Format,
    /// Path of the file.
    pub path: PathBuf,
}

impl Backing {
    /// Returns the backing file of the options (`-b`, `-o backing_file`), or `None`.
    pub fn find(
        name: Option<&str>,
        format: Option<Format>,
        settings: &Settings,
        target: &Path,
    ) -> Result<Option<Self>> {
        let given =
            settings.text("backing_fmt").map(str::parse::<blockyard_image::Format>).transpose()?;
        let name = name.or(settings.text("backing_file"));
        name.map(|name| Backing::new(name, format.or(given), target)).transpose()
    }

    /// Returns a backing file for the image `target`. Relative names are relative to the folder of
    /// `target`.
    pub fn new(name: &str, format: Option<Format>, target: &Path) -> Result<Self> {
        if name.is_empty() {
            bail!("the backing file's name is empty");
        }
        let path = if scheme(name).is_some() { name.into() } else { folder(target).join(name) };
        let format = format.or_else(|| Format::of_name(&path));
        let format = format.ok_or_else(|| {
            anyhow!(
                "backing file {name}: its format is not clear from the name: give -F raw, qcow2 or cow"
            )
        })?;
        Ok(Backing { name: name.into(), format, path })
    }

    /// Returns the name that a qcow2 image stores. Fails if no reader would take it for a path.
    pub fn stored_name(&self) -> Result<&str> {
        match scheme(&self.name) {
            Some(_) => Ok(&self.name),
            None => stored_path("backing file", &self.name),
        }
    }

    /// Returns the size in bytes of the disk in the backing file. Returns an error if the file
    /// cannot be opened in its format.
    pub fn size(&self, folders: &FolderArgs) -> Result<u64> {
        let options =
            ChainOptions { no_backing: true, ..folders.reading(&self.path, Some(self.format)) };
        Ok(Chain::open(&options)?.size())
    }

    /// Returns options to open the backing file with its own backing chain, for an image at
    /// `target`.
    pub fn reading(&self, folders: &FolderArgs, target: &Path) -> ChainOptions {
        let mut options = folders.reading(&self.path, Some(self.format));
        // The user gave its name, so its folder is allowed.
        options.folders.extend([folder(target).into(), folder(&self.path).into()]);
        options
    }

    /// Opens the backing file with its backing chain, for a new image at `target`. The caller
    /// checks that `target` replaces none of these files.
    pub fn chain(&self, folders: &FolderArgs, target: &Path) -> Result<Arc<Chain>> {
        let chain = Chain::open(&self.reading(folders, target));
        Ok(Arc::new(chain.context(
            "cannot open the backing file, which --force needs to check that it does not \
                 replace a file of the backing chain",
        )?))
    }

    /// Returns the backing file's path, its size in bytes and its modification time, for the header
    /// of a COW file.
    pub fn of_cow(&self) -> Result<(String, u64, i64)> {
        if scheme(&self.name).is_some() {
            bail!(
                "backing file {}: the backing file of a cow image is a file of this host",
                self.name
            );
        }
        if self.format != Format::Raw {
            bail!("backing file {}: the backing file of a cow image is raw", self.name);
        }
        let wrong = || format!("backing file {}", self.path.display());
        let stat = std::fs::metadata(&self.path).with_context(wrong)?;
        // An absolute path, as uml_mkcow and the kernel write it. They resolve a relative one in
        // their working directory.
        let path = std::fs::canonicalize(&self.path).with_context(wrong)?;
        Ok((path.to_str().with_context(wrong)?.into(), stat.len(), stat.mtime()))
    }

    /// Warns if opening the image will need `--backing-folder`, because the backing file is not in
    /// the folder of `target`.
    pub fn warn_if_far(&self, target: &Path) {
        if let Some(scheme) = scheme(&self.name) {
            return tracing::warn!(
                "the backing file is not a file of this host: open the image with --backing-folder {}",
                scheme.allowance(&self.name)
            );
        }
        let real = |path: &Path| std::fs::canonicalize(path);
        if let (Ok(own), Ok(path)) = (real(folder(target)), real(&self.path))
            && !path.starts_with(own)
        {
            let folder = folder(&self.path).display();
            tracing::warn!(
                "the backing file is not in the image's folder: open the image with \
                 --backing-folder {folder}"
            );
        }
    }
}

/// Returns the scheme of a name, if images may refer to such names. None: it is a path.
fn scheme(name: &str) -> Option<&'static dyn StorageScheme> {
    let (scheme, name) = scheme_of(Path::new(name))?;
    let is_refused = |e: StorageError| e.kind == ErrorKind::Refused;
    (!scheme.normalize(name).is_err_and(is_refused)).then_some(scheme)
}

/// Returns the name of a file, if an image may store it. `role`: what the file is to the image.
fn stored_path<'a>(role: &str, name: &'a str) -> Result<&'a str> {
    // QEMU takes an empty word for a protocol, too.
    if name.starts_with(':') || !names_a_path(name) {
        bail!(
            "{role} {name}: in an image, the word before a colon names a protocol: write ./{name}"
        );
    }
    Ok(name)
}

/// Fails if the folder of a new image does not exist.
pub fn check_folder(target: &Path) -> anyhow::Result<()> {
    let folder = folder(target);
    if !matches!(folder.try_exists(), Ok(false)) {
        return Ok(());
    }
    let what = match folder.is_symlink() {
        true => "is a link to nothing: remove or mend it",
        false => "does not exist: create it first",
    };
    anyhow::bail!("{}: its folder {} {what}", target.display(), folder.display())
}

/// Returns the folder of a file.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the parameters of a new image at `target`, including its external data file. `size`:
/// bytes of the disk.
pub fn plan(
    settings: &Settings,
    size: u64,
    backing: Option<&Backing>,
    target: &Path,
) -> Result<NewImage> {
    match settings.format() {
        Format::Raw if backing.is_some() => {
            bail!("raw images have no backing files: choose another format by -O or -f")
        }
        Format::Raw => Ok(NewImage::Raw {
            size,
            preallocation: settings.preallocation()?.unwrap_or(Preallocation::Off),
        }),
        Format::Qcow2 => {
            let options = qcow2(settings, size, backing)?;
            let data = options.data_file.as_ref().map(|name| folder(target).join(name));
            Ok(NewImage::Qcow2 { options, data })
        }
        Format::Cow => cow(settings, backing),
    }
}

fn qcow2(settings: &Settings, size: u64, backing: Option<&Backing>) -> Result<CreateOptions> {
    let plain = CreateOptions::new(size);
    let base = match backing {
        Some(backing) => {
            CreateOptions::overlay(size, backing.stored_name()?, backing.format.to_string())
        }
        None => plain.clone(),
    };
    let data_file = settings.text("data_file").map(|name| stored_path("data file", name));
    let data_file = data_file.transpose()?.map(str::to_string);
    let (version, cluster_size) =
        (settings.version()?.unwrap_or(base.version), settings.size("cluster_size")?);
    // Defaults depend on the given options.
    let suits = version >= 3 && cluster_size.is_none_or(|size| size >= MIN_EXTENDED_CLUSTER);
    let extended_l2 = settings.switch("extended_l2")?.unwrap_or(base.extended_l2 && suits);
    let default_size =
        if extended_l2 && backing.is_some() { base.cluster_size } else { plain.cluster_size };
    Ok(CreateOptions {
        version,
        cluster_size: cluster_size.unwrap_or(default_size),
        extended_l2,
        refcount_bits: settings.number("refcount_bits")?.unwrap_or(base.refcount_bits),
        lazy_refcounts: settings.switch("lazy_refcounts")?.unwrap_or(false),
        compression: settings.compression()?.unwrap_or(Compression::Zlib),
        data_file,
        data_file_raw: settings.switch("data_file_raw")?.unwrap_or(false),
        preallocation: settings.preallocation()?.unwrap_or(Preallocation::Off),
        ..base
    })
}

fn cow(settings: &Settings, backing: Option<&Backing>) -> Result<NewImage> {
    let backing = backing.context("a cow image needs a backing file: give it by -b, or -B")?;
    let (backing, size, mtime) = backing.of_cow()?;
    let version = settings.number("version")?.unwrap_or(3);
    let alignment = settings.size("alignment")?.unwrap_or(if version == 3 { 4096 } else { 512 });
    let alignment = u32::try_from(alignment).context("option alignment")?;
    Ok(NewImage::Cow { backing, size, mtime, version, alignment })
}

/// Returns a line about the new image, in the format of qemu-img.
pub fn describe(path: &Path, new: &NewImage) -> String {
    let (format, text) = match new {
        NewImage::Raw { size, .. } => (Format::Raw, format!("size={size}")),
        NewImage::Cow { backing, size, version, .. } => (
            Format::Cow,
            format!("version={version} size={size} backing_file={backing} backing_fmt=raw"),
        ),
        NewImage::Qcow2 { options, .. } => (Format::Qcow2, describe_qcow2(options)),
    };
    format!("Formatting '{}', fmt={format} {text}\n", path.display())
}

fn describe_qcow2(options: &CreateOptions) -> String {
    let switch = |on| if on { "on" } else { "off" };
    let compression = if options.compression == Compression::Zstd { "zstd" } else { "zlib" };
    let mut text = format!(
        "cluster_size={} extended_l2={} compression_type={compression} size={}",
        options.cluster_size,
        switch(options.extended_l2),
        options.size
    );
    if let Some((name, format)) = &options.backing {
        text += &format!(" backing_file={name} backing_fmt={format}");
    }
    if let Some(name) = &options.data_file {
        text += &format!(" data_file={name} data_file_raw={}", switch(options.data_file_raw));
    }
    text + &format!(
        " lazy_refcounts={} refcount_bits={}",
        switch(options.lazy_refcounts),
        options.refcount_bits
    )
}
