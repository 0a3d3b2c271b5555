//! SIGHUP for NBD: renewed certificates, revoked certificates, other limits. A wrong file changes
//! nothing.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use blockyard_nbd::wire::{OptionHeader, OptionReply, opt, rep};
use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};

use crate::common::{Daemon, SOON, Signal, tool};
use crate::guest::{Guest, pattern};
use crate::tls::{Authority, TlsFixture, authority, certify};

const APPLIED: &str = "new settings for NBD clients: ";
const REFUSED: &str = "not reloaded: ";

/// Sends SIGHUP, waits until the log has `expected`, and returns the new log lines.
#[track_caller]
fn reload(daemon: &Daemon, expected: &str) -> String {
    let from = daemon.log().len();
    daemon.signal(Signal::HUP);
    daemon.wait_log_after(from, expected)
}

/// Writes the authority's revocation list with the certificates of `names`.
fn revoke(folder: &Path, authority: &Authority, names: &[&str]) {
    std::fs::write(folder.join("ca-crl.pem"), revoked_by(authority, names)).unwrap();
}

fn revoked_by(authority: &Authority, names: &[&str]) -> String {
    let revoked = |name: &&str| RevokedCertParams {
        serial_number: SerialNumber::from_slice(name.as_bytes()),
        revocation_time: rcgen::date_time_ymd(2021, 1, 1),
        reason_code: None,
        invalidity_date: None,
    };
    let list = CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2021, 1, 2),
        next_update: rcgen::date_time_ymd(2121, 1, 1),
        crl_number: SerialNumber::from(names.len() as u64 + 1),
        issuing_distribution_point: None,
        revoked_certs: names.iter().map(revoked).collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(authority).unwrap().pem().unwrap()
}

/// New clients see the new certificate, and connected clients stay. If a file is wrong, the last
/// valid certificates stay in use.
#[test]
fn new_clients_see_a_renewed_certificate() {
    let mut fixture = TlsFixture::new();
    let daemon = fixture.serve("tls-verify-peer = true");
    let vhost = fixture.folder.join("s");
    let other = Daemon::serve(fixture.uri("all", &fixture.vm1), &vhost, &[]);
    let mut guest = Guest::connect(&vhost);
    let bytes = pattern(3, 4096);
    certify(&fixture.server, &fixture.ours, "server", "renewed.example", false);
    fixture.all_may("all", &fixture.vm1);
    let logged = reload(&daemon, APPLIED);
    assert!(logged.contains("TLS: required, certificates read again"), "{logged}");
    fixture.none_may("all", &fixture.vm1, "not valid for name");
    fixture.host = "renewed.example";
    fixture.all_may("all", &fixture.vm1);
    assert!(guest.read(0, 4096).unwrap() == bytes);

    let good = |name: &str| std::fs::read(fixture.server.join(name)).unwrap();
    let files = ["server-cert.pem", "server-key.pem", "ca-cert.pem"].map(|name| (name, good(name)));
    let (certificate, key) = (&files[0].1, &files[1].1);
    let half = certificate[..certificate.len() / 2].to_vec();
    let others_key = std::fs::read(fixture.vm1.join("client-key.pem")).unwrap();
    for (name, content, expected) in [
        ("server-cert.pem", Some(half), "server-cert.pem: "),
        ("server-cert.pem", None, "server-cert.pem: "),
        ("server-key.pem", Some(b"nothing of a key".to_vec()), "server-key.pem: "),
        ("server-key.pem", Some(others_key), "server-cert.pem: server-key.pem is not its key"),
        ("ca-cert.pem", Some(key.clone()), "ca-cert.pem: there is nothing of that kind in it"),
        ("ca-crl.pem", Some(Vec::new()), "ca-crl.pem: there is nothing of that kind in it"),
    ] {
        let path = fixture.server.join(name);
        let _ = std::fs::remove_file(&path);
        content.iter().for_each(|content| std::fs::write(&path, content).unwrap());
        let logged = reload(&daemon, REFUSED);
        assert!(
            logged.contains("not reloaded: TLS: ") && logged.contains(expected),
            "{expected}: {logged}"
        );
        assert!(!logged.contains(APPLIED), "{logged}");
        fixture.all_may("all", &fixture.vm1);
        let _ = std::fs::remove_file(&path);
        files.iter().for_each(|(name, content)| {
            std::fs::write(fixture.server.join(name), content).unwrap()
        });
    }
    reload(&daemon, APPLIED);
    fixture.all_may("all", &fixture.vm1);
    assert!(guest.read(0, 4096).unwrap() == bytes);
    assert!(
        !other.log().contains("again"),
        "the client that was there had to come again: {}",
        other.log()
    );
    drop(guest);
    other.stop();
    daemon.stop();
}

/// A client whose certificate is in ca-crl.pem is disconnected, whether TLS is required or not.
/// Other clients are admitted. The same applies to servers.
#[test]
fn revoked_certificates_are_refused() {
    let fixture = TlsFixture::new();
    revoke(&fixture.server, &fixture.ours, &["vm2.example"]);
    for table in ["tls-verify-peer = true", "tls-required = true"] {
        let daemon = fixture.serve(table);
        fixture.all_may("all", &fixture.vm1);
        fixture.none_may("all", &fixture.vm2, "TLS: ");
        daemon.wait_log(") was disconnected: TLS: ");
        assert!(daemon.log().contains("Revoked"), "{}", daemon.log());
        daemon.stop();
    }
    // A reload applies the list to a running server.
    let daemon = fixture.serve("tls-verify-peer = true");
    revoke(&fixture.server, &fixture.ours, &["vm1.example"]);
    reload(&daemon, APPLIED);
    fixture.none_may("all", &fixture.vm1, "TLS: ");
    fixture.all_may("all", &fixture.vm2);
    std::fs::remove_file(fixture.server.join("ca-crl.pem")).unwrap();
    reload(&daemon, APPLIED);
    fixture.all_may("all", &fixture.vm1);
    // Clients check the server's certificate.
    revoke(&fixture.vm1, &fixture.ours, &["vm2.example"]);
    fixture.all_may("all", &fixture.vm1);
    revoke(&fixture.vm1, &fixture.ours, &["vm2.example", "localhost"]);
    // QEMU reads a revocation list in the folder of a client, but does not use it.
    let [ours, libnbd, _] = fixture.ask_all("all", &fixture.vm1);
    assert!(!ours.status.success() && ours.err.contains("Revoked"), "{}", ours.err);
    assert!(
        !libnbd.status.success() && libnbd.err.contains("certificate verification"),
        "{}",
        libnbd.err
    );
    daemon.stop();
}

/// Rejects a certificate whose authority has no revocation list while other authorities have one.
#[test]
fn each_authority_needs_a_revocation_list_if_one_has_it() {
    let fixture = TlsFixture::new();
    let second = authority("second");
    let theirs = certify(&fixture.folder.join("theirs"), &second, "client", "vm3.example", false);
    for folder in [&theirs, &fixture.server] {
        std::fs::write(folder.join("ca-cert.pem"), fixture.ours.pem() + &second.pem()).unwrap();
    }
    let daemon = fixture.serve("tls-verify-peer = true");
    fixture.all_may("all", &theirs);
    revoke(&fixture.server, &fixture.ours, &["vm2.example"]);
    reload(&daemon, APPLIED);
    fixture.none_may("all", &theirs, "TLS: ");
    daemon.wait_log("UnknownRevocationStatus");
    let both = revoked_by(&fixture.ours, &["vm2.example"]) + &revoked_by(&second, &["another"]);
    std::fs::write(fixture.server.join("ca-crl.pem"), both).unwrap();
    reload(&daemon, APPLIED);
    fixture.all_may("all", &theirs);
    fixture.all_may("all", &fixture.vm1);
    fixture.none_may("all", &fixture.vm2, "TLS: ");
    daemon.stop();
}

/// A reload makes TLS required, and then optional.
#[test]
fn a_reload_changes_whether_tls_is_required() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("");
    let plain = format!("nbd+unix:///all?socket={}", fixture.socket.display());
    let served = || tool("nbdinfo", ["--size", &plain]).status.success();
    assert!(served());
    fixture.configure("tls-required = true");
    reload(&daemon, APPLIED);
    assert!(!served());
    fixture.all_may("all", &fixture.anonymous);
    fixture.configure("tls-verify-peer = true");
    reload(&daemon, APPLIED);
    fixture.none_may("all", &fixture.anonymous, "TLS: ");
    fixture.all_may("all", &fixture.vm2);
    let path = fixture.configure("");
    reload(&daemon, APPLIED);
    assert!(served());
    // A disk with `tls-allow` needs TLS.
    let config = std::fs::read_to_string(&path).unwrap();
    let without: Vec<_> =
        config.lines().filter(|line| !line.starts_with("tls-certificates")).collect();
    std::fs::write(&path, without.join("\n")).unwrap();
    let logged = reload(&daemon, REFUSED);
    assert!(
        logged.contains("disk \"vm1\": tls-allow names client certificates, and there is no TLS"),
        "{logged}"
    );
    fixture.all_may("vm1", &fixture.vm1);
    daemon.stop();
}

/// A reload changes which clients may use a disk. Other clients of the disk stay connected.
#[test]
fn a_reload_changes_which_clients_may_use_a_disk() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("tls-required = true");
    let vhost = fixture.folder.join("s");
    let other = Daemon::serve(fixture.uri("vm1", &fixture.vm1), &vhost, &[]);
    let mut guest = Guest::connect(&vhost);
    assert_eq!(guest.write(0, &pattern(4, 4096)), 0);
    assert_eq!(guest.flush(), 0);
    fixture.none_may("vm1", &fixture.vm2, "no such export");
    let configure = |names: &str, expected: &str| {
        let path = fixture.configure("tls-required = true");
        let config = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, config.replace("tls-allow = [\"VM1.example\"]", names)).unwrap();
        let logged = reload(&daemon, "reloaded: ");
        assert!(logged.contains(expected), "{expected}: {logged}");
        logged
    };
    let allow = |names: &str| configure(names, "changed without closing it: tls-allow: ");
    allow("tls-allow = [\"vm1.example\", \"vm2.example\"]");
    fixture.all_may("vm1", &fixture.vm2);
    fixture.none_may("vm1", &fixture.anonymous, "no such export");
    assert!(guest.read(0, 4096).unwrap() == pattern(4, 4096));
    assert!(
        !other.log().contains("again"),
        "the client that was there had to come again: {}",
        other.log()
    );
    // Remove the name of a connected client.
    let from = daemon.log().len();
    let logged = allow("tls-allow = [\"vm2.example\"]");
    assert!(logged.contains("-> [\"vm2.example\"]"), "{logged}");
    daemon.wait_log_after(from, "an NBD client disconnected");
    fixture.none_may("vm1", &fixture.vm1, "no such export");
    fixture.all_may("vm1", &fixture.vm2);
    // A disk in memory stays open, although its description has changed. The revocation counts.
    configure("tls-allow = [\"vm1.example\"]\ndescription = \"x\"", "would be lost");
    fixture.none_may("vm1", &fixture.vm2, "no such export");
    fixture.all_may("vm1", &fixture.vm1);
    allow("");
    fixture.all_may("vm1", &fixture.anonymous);
    assert!(guest.read(0, 4096).unwrap() == pattern(4, 4096));
    other.wait_log("connected again");
    assert!(!daemon.log().contains("closing and opening"), "{}", daemon.log());
    drop(guest);
    other.stop();
    daemon.stop();
}

/// The last name of the list is removed: the list admits no client, also none without TLS.
#[test]
fn an_empty_list_of_names_admits_no_client() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("");
    let vhost = fixture.folder.join("s");
    let other = Daemon::serve(fixture.uri("vm1", &fixture.vm1), &vhost, &[]);
    let configure = |names: &str| {
        let path = fixture.configure("");
        let config = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, config.replace("tls-allow = [\"VM1.example\"]", names)).unwrap();
        let logged = reload(&daemon, "reloaded: ");
        assert!(logged.contains("changed without closing it: tls-allow: "), "{logged}");
    };
    let from = daemon.log().len();
    configure("tls-allow = []");
    daemon.wait_log_after(from, "an NBD client disconnected");
    fixture.none_may("vm1", &fixture.vm1, "no such export");
    fixture.none_may("vm1", &fixture.anonymous, "no such export");
    let plain = |export: &str| format!("nbd+unix:///{export}?socket={}", fixture.socket.display());
    assert!(!tool("nbdinfo", ["--size", &plain("vm1")]).status.success());
    let list = tool("nbdinfo", ["--list", &plain("")]).good();
    assert!(list.contains("\"all\"") && !list.contains("vm1"), "{list}");
    // Without the key the disk is for all clients.
    configure("");
    fixture.all_may("vm1", &fixture.anonymous);
    assert!(tool("nbdinfo", ["--size", &plain("vm1")]).status.success());
    other.stop();
    daemon.stop();
}

/// Waits for the server's greeting to the client.
#[track_caller]
fn is_greeted(stream: &mut UnixStream) {
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.read_exact(&mut [0; 18]).expect("the server greets the client");
}

/// Returns whether the server has sent anything to the client.
fn has_heard(stream: &UnixStream) -> bool {
    rustix::io::ioctl_fionread(stream).unwrap() > 0
}

/// A reload allows more clients, and gives less time for the handshake.
#[test]
fn a_reload_changes_the_limits_of_clients() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("max-clients = 1\nhandshake = \"600s\"");
    let connect = || UnixStream::connect(&fixture.socket).unwrap();
    let (mut first, mut second, mut third) = (connect(), connect(), connect());
    is_greeted(&mut first);
    fixture.configure("max-clients = 0");
    assert!(reload(&daemon, REFUSED).contains("max-clients is a number from 1 to 100000"));
    assert!(!has_heard(&second), "there is room for one");
    fixture.configure("max-clients = 2\nhandshake = \"200ms\"");
    let logged = reload(&daemon, APPLIED);
    assert!(logged.contains("at most 2 for each address, handshake within 200ms"), "{logged}");
    // The second client has the shorter time for its handshake, and is disconnected. Then the third
    // one is admitted. The first one keeps its longer time.
    is_greeted(&mut second);
    daemon.wait_log(") chose no export in 0.2 s: it was disconnected");
    is_greeted(&mut third);
    // The flags of the client, and an option.
    first.write_all(&3u32.to_be_bytes()).unwrap();
    let abort = OptionHeader { option: opt::ABORT, len: 0 };
    let mut bytes = Vec::new();
    abort.put(&mut bytes);
    first.write_all(&bytes).unwrap();
    let mut reply = [0; OptionReply::BYTES];
    first.read_exact(&mut reply).expect("the first client still has its handshake");
    assert_eq!(OptionReply::parse(&reply).unwrap().reply, rep::ACK);
    daemon.stop();
}
