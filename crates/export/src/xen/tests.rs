use super::*;

#[test]
fn names_map_to_the_device_numbers_of_guests() {
    for (name, number) in [
        ("xvda", 51712),
        ("xvdb", 51728),
        ("xvdp", 51952),
        ("xvdq", 1 << 28 | 16 << 8),
        ("xvdz", 268_441_856),
        ("xvdaa", 1 << 28 | 26 << 8),
        ("xvdzz", 1 << 28 | 701 << 8),
    ] {
        let parsed: Name = name.parse().unwrap();
        assert_eq!((parsed.number(), parsed.to_string().as_str()), (number, name));
        assert_eq!(Name::of_node(&number.to_string()), Some(parsed));
    }
    for name in ["", "xvd", "sda", "xvdA", "xvda1", "xvdaaa"] {
        assert!(name.parse::<Name>().is_err(), "{name}");
    }
    // The numbers of hda, of a partition, and of no device that guests use.
    for number in ["768", "51713", "4294967295"] {
        assert_eq!(Name::of_node(number).unwrap().to_string(), number);
    }
    for text in ["051712", "+51712", "-1", "", "4294967296", "51712x"] {
        assert_eq!(Name::of_node(text), None, "{text}");
    }
}

#[test]
fn a_detach_creates_no_nodes_for_a_removed_device() {
    let machine = blockyard_ring::xen::Machine::new();
    let mut store = machine.store(0).unwrap();
    let device = "xvda".parse().unwrap();
    let paths = Paths::new(
        0,
        &XenOptions { domain: 7, device, queues: 1, data: XenData::Auto, records: None },
    );
    // The device's server has removed the nodes since `detach` found the device.
    paths.request_close(&mut store).unwrap();
    assert_eq!(store.list(&paths.back).unwrap(), [""; 0]);
    store.write(&format!("{}/online", paths.back), 1).unwrap();
    paths.request_close(&mut store).unwrap();
    assert_eq!(
        (paths.online(&mut store).unwrap(), paths.back_state(&mut store).unwrap().map(|s| s as u8)),
        (Some(false), Some(5))
    );
}
