//! Two exports of one image, each of which has it open only while its rings run.

use std::io::Read;
use std::path::PathBuf;

use blockyard_disk::{Disk, Source};
use blockyard_driver::{Data, SplitRing, request, status};
use blockyard_image::{CacheMode, ChainOptions};
use vhost::vhost_user::message::FrontendReq as R;

use crate::front::*;

fn image(name: &str) -> PathBuf {
    let name = format!("blockyard-handover-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

fn server(image: &PathBuf) -> Front<SplitRing> {
    let writable = ChainOptions { cache: CacheMode::Writeback, ..ChainOptions::new(image) };
    let first = ChainOptions { read_only: true, force_share: true, ..writable.clone() };
    let disk = Disk::new(options(Vec::new()), Source::open(&first).unwrap());
    Front::serving(disk.until_activated(writable), true)
}

fn call(front: &mut Front<SplitRing>, kind: u32, byte: u8) -> Vec<u8> {
    let mut bytes = vec![byte; 4096];
    let data = if kind == request::OUT { Data::ToDevice(4096) } else { Data::FromDevice(4096) };
    assert_eq!(front.queue.call(kind, 0, data, &mut bytes, LIMIT).unwrap(), status::OK);
    bytes
}

#[test]
fn the_image_goes_from_one_server_to_the_other_and_back() {
    let image = image("goes");
    let (mut source, mut target) = (server(&image), server(&image));
    assert_eq!(source.connection.config().unwrap().capacity_sectors, 2048);
    assert_eq!(target.connection.config().unwrap(), source.connection.config().unwrap());
    assert!(source.disk.is_inactive() && target.disk.is_inactive());
    source.start();
    assert!(!source.disk.is_inactive());
    call(&mut source, request::OUT, 1);

    // The target's ring starts before the source has stopped: it waits for the lock.
    let started = std::thread::spawn(move || {
        target.start();
        target
    });
    call(&mut source, request::OUT, 2);
    let base = source.connection.stop_ring(0).unwrap();
    assert!(source.disk.is_inactive());
    let mut target = started.join().unwrap();
    assert_eq!(call(&mut target, request::IN, 0), [2; 4096]);
    call(&mut target, request::OUT, 3);

    // The end of the session is the end of its rings.
    drop(target);
    source.connection.set_ring(&source.queue.setup(), base, &source.memory).unwrap();
    source.connection.enable(0, true).unwrap();
    assert_eq!(call(&mut source, request::IN, 0), [3; 4096]);
    // A reset of the device releases the image too.
    assert_eq!(source.ask(R::RESET_DEVICE, &[], &[]), Some(words(&[0])));
    assert!(source.disk.is_inactive());
    std::fs::remove_file(image).unwrap();
}

#[test]
fn a_ring_without_an_image_ends_the_session() {
    let image = image("gone");
    let mut front = server(&image);
    std::fs::remove_file(&image).unwrap();
    let setup = front.queue.setup();
    assert!(front.connection.set_ring(&setup, 0, &front.memory).is_err());
    let ended = front.connection.socket().read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(ended, 0, "the session has ended");
}
