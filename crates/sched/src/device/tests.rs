//! What a device decides at once, and not only at the end of a control period.

use super::*;
use crate::{DeviceProfile, Host, Knobs, ReactorShare};

const NOW: Time = 1_000_000_000;

/// Returns two disks that share a device.
fn neighbours() -> [ReactorShare; 2] {
    let host = Host::default();
    let device = Some(("d", &DeviceProfile::FLASH));
    [(); 2].map(|()| host.share(device, None, &Knobs::default()).on_reactor())
}

#[test]
fn the_window_closes_as_soon_as_a_disk_begins_to_work_beside_another() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    let _ = one.ask(NOW, &SMALL).unwrap();
    let open = device.window();
    let _ = two.ask(NOW, &SMALL).unwrap();
    assert!(device.window() < open / 2, "{} of {open}", device.window());
}

#[test]
fn a_wait_that_is_cancelled_ends_the_probe() {
    let [one, two] = neighbours();
    let device = one.device().unwrap();
    for disk in [&one, &two] {
        let _ = disk.ask(NOW, &SMALL).unwrap();
    }
    let accounts: Vec<_> = device.state().accounts.iter().flatten().cloned().collect();
    accounts[1].is_over_share.store(true, Relaxed);
    device.begin_probe(&mut device.state(), NOW);
    assert!(device.state().probe.is_on() && accounts[1].held.load(Relaxed));
    one.withdraw(NOW + 1);
    assert!(!device.state().probe.is_on() && !accounts[1].held.load(Relaxed));
}
