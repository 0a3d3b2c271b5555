//! The settings for fair shares, from the configuration and from the measured costs of devices.

use std::path::Path;

use anyhow::Context;
use blockyard_program::costs::{USUAL, read};
use blockyard_sched::Calibration;
use blockyard_yard::{MeasuredDevice, Shares};

use crate::config::Config;
use crate::options::serve::ServeOptions;

/// Returns the settings of the shares. Reads the file of costs: the configured one, or the default
/// one if it exists.
pub fn from_configuration(options: &ServeOptions, config: &Config) -> anyhow::Result<Shares> {
    let costs = match options.costs.as_ref().or(config.costs.as_ref()) {
        Some(path) => {
            read(path).context(if options.costs.is_some() { "--costs" } else { "the key costs" })?
        }
        None if Path::new(USUAL).exists() => read(Path::new(USUAL))?,
        None => Vec::new(),
    };
    let measured = costs.iter().filter(|known| {
        let is_of_another = known.is_of_another();
        if is_of_another {
            tracing::warn!(
                "the costs of device {} were measured on \"{}\", which it is not now: they are not \
                 used (`blockyard bench calibrate` measures them again)",
                known.device,
                known.description
            );
        }
        !is_of_another
    });
    let measured = measured.map(|known| MeasuredDevice {
        device: known.device.clone(),
        calibration: Calibration {
            costs: known.costs(),
            window_ns: Some(known.window).filter(|window| *window > 0),
            baseline_read_ns: known.base_latency_read,
            baseline_write_ns: known.base_latency_write,
        },
    });
    let is_fair = !options.no_fair_share && config.fair_share != Some(false);
    Ok(Shares::new(is_fair, measured.collect(), config.group_knobs()))
}
