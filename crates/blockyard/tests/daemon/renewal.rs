//! What NBD clients meet after SIGHUP: renewed certificates, revoked ones, other limits; and what
//! is wrong changes nothing.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};

use crate::common::{Daemon, SOON, Signal, tool};
use crate::guest::{Guest, pattern};
use crate::tls::{Authority, Stage, authority, certify};

const TAKEN_UP: &str = "NBD clients from now on: ";
const REFUSED: &str = "not reloaded: ";

/// SIGHUP; what the log says of it.
#[track_caller]
fn reload(daemon: &Daemon, says: &str) -> String {
    let from = daemon.log().len();
    daemon.signal(Signal::HUP);
    daemon.wait_log_after(from, says)
}

/// Writes a list of the certificates of these names, which the authority has revoked.
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

/// Clients that come see the new certificate, who is there stays, and files that are wrong leave
/// the last good ones in use.
#[test]
fn a_renewed_certificate() {
    let mut stage = Stage::new();
    let daemon = stage.serve("tls-verify-peer = true");
    let vhost = stage.folder.join("s");
    let other = Daemon::serve(stage.uri("all", &stage.vm1), &vhost, &[]);
    let mut guest = Guest::connect(&vhost);
    let bytes = pattern(3, 4096);
    certify(&stage.server, &stage.ours, "server", "renewed.example", false);
    stage.all_may("all", &stage.vm1);
    let said = reload(&daemon, TAKEN_UP);
    assert!(said.contains("TLS: demanded, certificates as they are now"), "{said}");
    stage.none_may("all", &stage.vm1, "not valid for name");
    stage.host = "renewed.example";
    stage.all_may("all", &stage.vm1);
    assert!(guest.read(0, 4096).unwrap() == bytes);

    let good = |name: &str| std::fs::read(stage.server.join(name)).unwrap();
    let files = ["server-cert.pem", "server-key.pem", "ca-cert.pem"].map(|name| (name, good(name)));
    let (certificate, key) = (&files[0].1, &files[1].1);
    let half = certificate[..certificate.len() / 2].to_vec();
    let others_key = std::fs::read(stage.vm1.join("client-key.pem")).unwrap();
    for (name, content, says) in [
        ("server-cert.pem", Some(half), "server-cert.pem: "),
        ("server-cert.pem", None, "server-cert.pem: "),
        ("server-key.pem", Some(b"nothing of a key".to_vec()), "server-key.pem: "),
        ("server-key.pem", Some(others_key), "server-cert.pem: server-key.pem is not its key"),
        ("ca-cert.pem", Some(key.clone()), "ca-cert.pem: there is nothing of that kind in it"),
        ("ca-crl.pem", Some(Vec::new()), "ca-crl.pem: there is nothing of that kind in it"),
    ] {
        let path = stage.server.join(name);
        let _ = std::fs::remove_file(&path);
        content.iter().for_each(|content| std::fs::write(&path, content).unwrap());
        let said = reload(&daemon, REFUSED);
        assert!(said.contains("not reloaded: TLS: ") && said.contains(says), "{says}: {said}");
        assert!(!said.contains(TAKEN_UP), "{said}");
        stage.all_may("all", &stage.vm1);
        let _ = std::fs::remove_file(&path);
        files
            .iter()
            .for_each(|(name, content)| std::fs::write(stage.server.join(name), content).unwrap());
    }
    reload(&daemon, TAKEN_UP);
    stage.all_may("all", &stage.vm1);
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

/// Whose certificate is in ca-crl.pem is let go, whether certificates are demanded or not; others
/// are let in. The same for a server.
#[test]
fn revoked_certificates() {
    let stage = Stage::new();
    revoke(&stage.server, &stage.ours, &["vm2.example"]);
    for table in ["tls-verify-peer = true", "tls-required = true"] {
        let daemon = stage.serve(table);
        stage.all_may("all", &stage.vm1);
        stage.none_may("all", &stage.vm2, "TLS: ");
        daemon.wait_log(") was let go: TLS: ");
        assert!(daemon.log().contains("Revoked"), "{}", daemon.log());
        daemon.stop();
    }
    // Of a server that runs.
    let daemon = stage.serve("tls-verify-peer = true");
    revoke(&stage.server, &stage.ours, &["vm1.example"]);
    reload(&daemon, TAKEN_UP);
    stage.none_may("all", &stage.vm1, "TLS: ");
    stage.all_may("all", &stage.vm2);
    std::fs::remove_file(stage.server.join("ca-crl.pem")).unwrap();
    reload(&daemon, TAKEN_UP);
    stage.all_may("all", &stage.vm1);
    // What clients know of servers.
    revoke(&stage.vm1, &stage.ours, &["vm2.example"]);
    stage.all_may("all", &stage.vm1);
    revoke(&stage.vm1, &stage.ours, &["vm2.example", "localhost"]);
    // (QEMU reads a client's list, too, and has no use for it.)
    let [ours, libnbd, _] = stage.ask_all("all", &stage.vm1);
    assert!(!ours.status.success() && ours.err.contains("Revoked"), "{}", ours.err);
    assert!(
        !libnbd.status.success() && libnbd.err.contains("certificate verification"),
        "{}",
        libnbd.err
    );
    daemon.stop();
}

/// Whose authority has no list beside those of others is let go: nobody knows what it has revoked.
#[test]
fn lists_of_several_authorities() {
    let stage = Stage::new();
    let second = authority("second");
    let theirs = certify(&stage.folder.join("theirs"), &second, "client", "vm3.example", false);
    for folder in [&theirs, &stage.server] {
        std::fs::write(folder.join("ca-cert.pem"), stage.ours.pem() + &second.pem()).unwrap();
    }
    let daemon = stage.serve("tls-verify-peer = true");
    stage.all_may("all", &theirs);
    revoke(&stage.server, &stage.ours, &["vm2.example"]);
    reload(&daemon, TAKEN_UP);
    stage.none_may("all", &theirs, "TLS: ");
    daemon.wait_log("UnknownRevocationStatus");
    let both = revoked_by(&stage.ours, &["vm2.example"]) + &revoked_by(&second, &["another"]);
    std::fs::write(stage.server.join("ca-crl.pem"), both).unwrap();
    reload(&daemon, TAKEN_UP);
    stage.all_may("all", &theirs);
    stage.all_may("all", &stage.vm1);
    stage.none_may("all", &stage.vm2, "TLS: ");
    daemon.stop();
}

/// TLS that is demanded, and not any more.
#[test]
fn tls_is_demanded_from_now_on() {
    let stage = Stage::new();
    let daemon = stage.serve("");
    let plain = format!("nbd+unix:///all?socket={}", stage.socket.display());
    let served = || tool("nbdinfo", ["--size", &plain]).status.success();
    assert!(served());
    stage.configure("tls-required = true");
    reload(&daemon, TAKEN_UP);
    assert!(!served());
    stage.all_may("all", &stage.nobody);
    stage.configure("tls-verify-peer = true");
    reload(&daemon, TAKEN_UP);
    stage.none_may("all", &stage.nobody, "TLS: ");
    stage.all_may("all", &stage.vm2);
    let path = stage.configure("");
    reload(&daemon, TAKEN_UP);
    assert!(served());
    // A disk that names clients cannot be without TLS.
    let config = std::fs::read_to_string(&path).unwrap();
    let without: Vec<_> =
        config.lines().filter(|line| !line.starts_with("tls-certificates")).collect();
    std::fs::write(&path, without.join("\n")).unwrap();
    let said = reload(&daemon, REFUSED);
    assert!(
        said.contains("disk \"vm1\": tls-allow names client certificates, and there is no TLS"),
        "{said}"
    );
    stage.all_may("vm1", &stage.vm1);
    daemon.stop();
}

/// Clients that may have a disk come and go; others of it stay connected.
#[test]
fn who_may_have_a_disk_from_now_on() {
    let stage = Stage::new();
    let daemon = stage.serve("tls-required = true");
    let vhost = stage.folder.join("s");
    let other = Daemon::serve(stage.uri("vm1", &stage.vm1), &vhost, &[]);
    let mut guest = Guest::connect(&vhost);
    assert_eq!(guest.write(0, &pattern(4, 4096)), 0);
    assert_eq!(guest.flush(), 0);
    stage.none_may("vm1", &stage.vm2, "no such export");
    let allow = |names: &str| {
        let path = stage.configure("tls-required = true");
        let config = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, config.replace("tls-allow = [\"VM1.example\"]", names)).unwrap();
        reload(&daemon, "changed while it is in use: tls-allow: ")
    };
    allow("tls-allow = [\"vm1.example\", \"vm2.example\"]");
    stage.all_may("vm1", &stage.vm2);
    stage.none_may("vm1", &stage.nobody, "no such export");
    assert!(guest.read(0, 4096).unwrap() == pattern(4, 4096));
    assert!(
        !other.log().contains("again"),
        "the client that was there had to come again: {}",
        other.log()
    );
    // The name of one who is connected is taken away.
    let from = daemon.log().len();
    let said = allow("tls-allow = [\"vm2.example\"]");
    assert!(said.contains("-> [\"vm2.example\"]"), "{said}");
    daemon.wait_log_after(from, "an NBD client went");
    stage.none_may("vm1", &stage.vm1, "no such export");
    stage.all_may("vm1", &stage.vm2);
    allow("");
    stage.all_may("vm1", &stage.nobody);
    assert!(guest.read(0, 4096).unwrap() == pattern(4, 4096));
    other.wait_log("connected again");
    assert!(!daemon.log().contains("closing "), "{}", daemon.log());
    drop(guest);
    other.stop();
    daemon.stop();
}

/// Whether the server greets who has connected, in that time.
fn is_greeted(stream: &mut UnixStream, limit: Duration) -> bool {
    stream.set_read_timeout(Some(limit)).unwrap();
    stream.read_exact(&mut [0; 18]).is_ok()
}

/// More clients than before, and less time for those who choose nothing.
#[test]
fn other_limits() {
    let stage = Stage::new();
    let daemon = stage.serve("max-clients = 1\nhandshake = \"600s\"");
    let connect = || UnixStream::connect(&stage.socket).unwrap();
    let (mut first, mut second, mut third) = (connect(), connect(), connect());
    assert!(is_greeted(&mut first, SOON));
    assert!(!is_greeted(&mut second, Duration::from_millis(300)), "there is room for one");
    stage.configure("max-clients = 0");
    assert!(reload(&daemon, REFUSED).contains("max-clients is a number from 1 to 100000"));
    stage.configure("max-clients = 2\nhandshake = \"200ms\"");
    let said = reload(&daemon, TAKEN_UP);
    assert!(said.contains("at most 2 of an address, 200ms to choose"), "{said}");
    // The second has little time, and goes; then the third comes. The first has all its time.
    assert!(is_greeted(&mut second, SOON));
    daemon.wait_log(") chose nothing in 0.2 s: it was let go");
    assert!(is_greeted(&mut third, SOON));
    first.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let end = first.read(&mut [0]);
    assert!(end.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock), "the first was let go");
    daemon.stop();
}
