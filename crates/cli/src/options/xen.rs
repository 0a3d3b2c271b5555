//! Options of Xen: the device of a guest, and the types of back end that toolstacks use.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{anyhow, bail};
use blockyard_export::xen::{Name, XenData};
use blockyard_image::CacheMode;
use clap::{Args, ValueHint};
use serde::{Deserialize, Deserializer};

use super::knobs::{self, with_knobs};
use super::values;

/// A device of a guest, such as `3:xvda` for domain 3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XenDevice {
    pub domain: u16,
    pub name: Name,
}

impl FromStr for XenDevice {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let parsed = s
            .split_once(':')
            .and_then(|(domain, name)| Some((domain.parse().ok()?, name.parse().ok()?)));
        let (domain, name) = parsed.ok_or_else(|| {
            format!("\"{s}\": a device of a guest is DOMID:DEVICE, such as 3:xvda")
        })?;
        Ok(XenDevice { domain, name })
    }
}

impl fmt::Display for XenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} of domain {}", self.name, self.domain)
    }
}

/// Settings for disks of toolstacks: options, which are also the keys of the table `[xen]`.
#[derive(Args, Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct XenArgs {
    /// Serve the disks that a Xen toolstack requests in backend/TYPE. May be repeated.
    ///
    /// TYPE is vbd (xl's disks with script=block-blockyard), or a type of the toolstack's own.
    #[arg(long = "xen-watch", value_name = "TYPE", help_heading = "Xen toolstacks",
        value_parser = values::suggest(&["vbd"], parse_kind), hide_possible_values = true)]
    #[serde(default, deserialize_with = "kinds")]
    pub watch: Vec<String>,

    /// Open images of these disks only in this folder or below. May be repeated.
    #[arg(long = "xen-folder", value_name = "FOLDER", help_heading = "Xen toolstacks",
        value_hint = ValueHint::DirPath)]
    #[serde(default)]
    pub folders: Vec<PathBuf>,

    /// Settings of these disks. Only in the configuration file.
    #[arg(skip)]
    #[serde(default)]
    pub defaults: Option<XenDefaults>,
}

with_knobs! {
/// The table `[xen.defaults]`: keys of a `[[disk]]` table that apply to each disk of a toolstack.
/// There are no options for them.
#[derive(Args, Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct XenDefaults {
    #[arg(skip)]
    #[serde(default, deserialize_with = "values::from_text")]
    pub cache: CacheMode,
    #[arg(skip)]
    #[serde(default, deserialize_with = "values::from_text")]
    pub xen_data: XenData,
    #[arg(skip)]
    #[serde(default = "values::one", deserialize_with = "values::queues")]
    pub queues: u16,
    #[arg(skip)]
    #[serde(default, deserialize_with = "values::size")]
    pub l2_cache: Option<u64>,
    #[arg(skip)]
    #[serde(default)]
    pub group: Option<String>,
}
}

fn parse_kind(text: &str) -> Result<String, String> {
    let is_good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
    let good = (1..=32).contains(&text.len()) && text.bytes().all(is_good);
    good.then(|| text.into()).ok_or_else(|| {
        format!("\"{text}\": a type of back end is vbd, or letters a to z, 0-9, - and _")
    })
}

/// Deserializes one type of back end, or a list of them.
fn kinds<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "it must be a type of back end, such as \"vbd\", or a list of them"
    )]
    enum Value {
        One(String),
        Many(Vec<String>),
    }
    let kinds = match Value::deserialize(d)? {
        Value::One(kind) => vec![kind],
        Value::Many(kinds) => kinds,
    };
    kinds.iter().map(|kind| parse_kind(kind).map_err(serde::de::Error::custom)).collect()
}

impl XenArgs {
    /// Returns these options, with the keys of `config` for those that are absent.
    pub fn or(&self, config: &XenArgs) -> XenArgs {
        let or = |own: &Vec<PathBuf>, other: &Vec<PathBuf>| {
            if own.is_empty() { other.clone() } else { own.clone() }
        };
        XenArgs {
            watch: if self.watch.is_empty() { config.watch.clone() } else { self.watch.clone() },
            folders: or(&self.folders, &config.folders),
            defaults: config.defaults.clone(),
        }
    }

    /// Returns an error if the settings contradict each other.
    pub fn check(&self) -> anyhow::Result<()> {
        if !self.watch.is_empty() && self.folders.is_empty() {
            bail!(
                "xen: no folder for images of toolstacks: set --xen-folder FOLDER, or folders in \
                 [xen]"
            );
        }
        let twice = (1..self.watch.len()).find(|at| self.watch[..*at].contains(&self.watch[*at]));
        if let Some(at) = twice {
            bail!("xen: backend/{} is listed twice", self.watch[at]);
        }
        match &self.defaults {
            Some(defaults) => {
                knobs::check(&defaults.knobs()).map_err(|e| anyhow!("xen.defaults: {e}"))
            }
            None => Ok(()),
        }
    }

    /// Returns the number of queues of each disk of a toolstack.
    pub fn queues(&self) -> u16 {
        self.defaults.as_ref().map_or(1, |defaults| defaults.queues)
    }
}
