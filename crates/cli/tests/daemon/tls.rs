//! NBD with TLS: our server and client with those of libnbd and QEMU (both GnuTLS), with valid and
//! invalid certificates.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockyard_nbd::tls;
use blockyard_nbd::wire::{
    self, Headers, OptionHeader, OptionReply, Request, SimpleReply, cmd, opt, rep,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, SerialNumber,
};

use crate::common::{BLOCKYARD, Daemon, Finished, Folder, SOON, blockyard, md5, tool, until};
use crate::guest::{Guest, pattern};
use crate::remote::Peer;

const SIZE: usize = 8 << 20;

pub type Authority = CertifiedIssuer<'static, KeyPair>;

pub fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Writes `OWNER-cert.pem` and `OWNER-key.pem` into a folder, and the certificate of the authority.
/// The bytes of the name are the serial number.
pub fn certify(
    folder: &Path,
    authority: &Authority,
    owner: &str,
    name: &str,
    expired: bool,
) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let mut params = CertificateParams::new(vec![name.to_string()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, format!("{name} itself"));
    let usage = match owner {
        "server" => ExtendedKeyUsagePurpose::ServerAuth,
        _ => ExtendedKeyUsagePurpose::ClientAuth,
    };
    params.extended_key_usages.push(usage);
    params.serial_number = Some(SerialNumber::from_slice(name.as_bytes()));
    if expired {
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
    }
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    std::fs::write(folder.join(format!("{owner}-cert.pem")), certificate.pem()).unwrap();
    std::fs::write(folder.join(format!("{owner}-key.pem")), key.serialize_pem()).unwrap();
    std::fs::write(folder.join("ca-cert.pem"), authority.pem()).unwrap();
    folder.into()
}

pub struct TlsFixture {
    pub folder: Folder,
    pub socket: PathBuf,
    pub disk: PathBuf,
    pub server: PathBuf,
    /// The name that clients expect in the certificate of the server.
    pub host: &'static str,
    pub ours: Authority,
    /// Folders of clients: two valid certificates, one of another authority, none, and an expired
    /// one.
    pub vm1: PathBuf,
    pub vm2: PathBuf,
    pub stranger: PathBuf,
    pub anonymous: PathBuf,
    pub late: PathBuf,
}

impl TlsFixture {
    pub fn new() -> Self {
        let folder = Folder::new();
        let (ours, others) = (authority("ours"), authority("others"));
        let client =
            |name: &str, expired| certify(&folder.join(name), &ours, "client", name, expired);
        let anonymous = folder.join("anonymous");
        std::fs::create_dir(&anonymous).unwrap();
        std::fs::write(anonymous.join("ca-cert.pem"), ours.pem()).unwrap();
        let stranger = certify(&folder.join("stranger"), &others, "client", "vm1.example", false);
        // The stranger trusts our server, but our server does not trust the stranger.
        std::fs::write(stranger.join("ca-cert.pem"), ours.pem()).unwrap();
        let disk = folder.join("disk.raw");
        std::fs::write(&disk, pattern(3, SIZE)).unwrap();
        TlsFixture {
            socket: folder.join("n"),
            host: "localhost",
            server: certify(&folder.join("server"), &ours, "server", "localhost", false),
            vm1: client("vm1.example", false),
            vm2: client("vm2.example", false),
            late: client("late.example", true),
            stranger,
            anonymous,
            disk,
            folder,
            ours,
        }
    }

    pub fn uri(&self, export: &str, certificates: &Path) -> String {
        let (socket, folder, host) = (self.socket.display(), certificates.display(), self.host);
        format!(
            "nbds+unix:///{export}?socket={socket}&tls-certificates={folder}&tls-hostname={host}"
        )
    }

    /// Serves the disk `all` for all clients, and a disk of 1 MiB for vm1 only. `table`: additional
    /// keys of the table `[nbd]`.
    pub fn serve(&self, table: &str) -> Daemon {
        let path = self.configure(table);
        let mut daemon =
            Daemon::start(Command::new(BLOCKYARD).arg("serve").arg("--config").arg(path));
        daemon.wait_ready();
        daemon
    }

    pub fn configure(&self, table: &str) -> PathBuf {
        let (socket, disk, server) =
            (self.socket.display(), self.disk.display(), self.server.display());
        let config = format!(
            "[nbd]\ntls-certificates = \"{server}\"\n{table}\n\
             [[disk]]\nimage = \"{disk}\"\nname = \"all\"\nnbd = \"unix:{socket}\"\n\
             [[disk]]\nimage = \"ram:1M\"\nname = \"vm1\"\nnbd = \"unix:{socket}\"\ntls-allow = [\"VM1.example\"]\n"
        );
        let path = self.folder.join("config.toml");
        std::fs::write(&path, config).unwrap();
        path
    }

    /// Returns the output of three clients about an export.
    pub fn ask_all(&self, export: &str, certificates: &Path) -> [Finished; 3] {
        let uri = self.uri(export, certificates);
        let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", certificates.display());
        let (path, host) = (self.socket.display(), self.host);
        let options = format!(
            "driver=nbd,server.type=unix,server.path={path},export={export},tls-creds=t,tls-hostname={host}"
        );
        [
            blockyard(["image", "info", &uri]),
            tool("nbdinfo", ["--size", &uri]),
            tool("qemu-img", ["info", "--object", &object, "--image-opts", &options]),
        ]
    }

    #[track_caller]
    pub fn all_may(&self, export: &str, certificates: &Path) {
        for (client, answer) in
            ["blockyard", "libnbd", "QEMU"].iter().zip(self.ask_all(export, certificates))
        {
            assert!(answer.status.success(), "{client}: {export}: {}{}", answer.out, answer.err);
        }
    }

    /// Checks that no client has access. `expected`: the message of our own client.
    #[track_caller]
    pub fn none_may(&self, export: &str, certificates: &Path, expected: &str) {
        let answers = self.ask_all(export, certificates);
        assert!(answers[0].err.contains(expected), "{expected}: {}", answers[0].err);
        for (client, answer) in ["blockyard", "libnbd", "QEMU"].iter().zip(answers) {
            assert!(!answer.status.success(), "{client}: {export}: {}", answer.out);
        }
    }
}

#[test]
fn only_allowed_clients_have_access() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("tls-required = true");
    for certificates in [&fixture.vm1, &fixture.vm2, &fixture.anonymous] {
        fixture.all_may("all", certificates);
    }
    fixture.all_may("vm1", &fixture.vm1);
    for certificates in [&fixture.vm2, &fixture.anonymous] {
        fixture.none_may("vm1", certificates, "no such export");
        let list = tool("nbdinfo", ["--list", &fixture.uri("", certificates)]).good();
        assert!(list.contains("\"all\"") && !list.contains("vm1"), "{list}");
    }
    fixture.none_may("all", &fixture.late, "TLS: ");
    // (A GnuTLS client sends no certificate to a server that lists other authorities. A rustls
    // client does.)
    fixture.none_may("vm1", &fixture.stranger, "TLS: ");
    daemon.wait_log(") was disconnected: TLS: ");
    let plain = format!("nbd+unix:///all?socket={}", fixture.socket.display());
    let refused = blockyard(["image", "info", &plain]);
    assert!(refused.err.contains("the server demands TLS: say nbds://"), "{}", refused.err);
    assert!(!tool("nbdinfo", ["--size", &plain]).status.success());
    // A client refuses the server if it trusts another authority, or expects another host name.
    std::fs::write(fixture.vm2.join("ca-cert.pem"), authority("another").pem()).unwrap();
    fixture.none_may("all", &fixture.vm2, "UnknownIssuer");
    let other = fixture.uri("all", &fixture.vm1).replace("localhost", "elsewhere.example");
    let refused = blockyard(["image", "info", &other]);
    assert!(refused.err.contains("not valid for name"), "{}", refused.err);
    daemon.stop();
}

#[test]
fn tls_and_client_certificates_are_required_or_optional() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("tls-verify-peer = true");
    fixture.all_may("all", &fixture.vm2);
    for certificates in [&fixture.anonymous, &fixture.stranger, &fixture.late] {
        fixture.none_may("all", certificates, "TLS: ");
    }
    daemon.stop();
    let daemon = fixture.serve("");
    let plain = |export: &str| format!("nbd+unix:///{export}?socket={}", fixture.socket.display());
    assert_eq!(tool("nbdinfo", ["--size", &plain("all")]).good().trim(), SIZE.to_string());
    // One export requires TLS, and the other does not exist. Without TLS a client cannot
    // distinguish them.
    for export in ["vm1", "none"] {
        let hidden = blockyard(["image", "info", &plain(export)]);
        assert!(hidden.err.contains("the server demands TLS"), "{}", hidden.err);
        let hidden = tool("nbdinfo", [&plain(export)]);
        assert!(
            hidden.err.contains(&format!("without TLS there is no export \"{export}\"")),
            "{}",
            hidden.err
        );
    }
    let list = tool("nbdinfo", ["--list", &plain("")]).good();
    assert!(list.contains("\"all\"") && !list.contains("vm1"), "{list}");
    fixture.none_may("vm1", &fixture.vm2, "no such export");
    fixture.all_may("vm1", &fixture.vm1);
    daemon.stop();
    // Certificates without authorities.
    let alone = fixture.folder.join("alone");
    std::fs::create_dir(&alone).unwrap();
    for name in ["server-cert.pem", "server-key.pem"] {
        std::fs::copy(fixture.server.join(name), alone.join(name)).unwrap();
    }
    for (options, expected) in [
        (&["--tls-required"][..], "no certificates are configured"),
        (&["--tls-allow", "x"], "there is no TLS"),
        (&["--tls-certificates", alone.to_str().unwrap(), "--tls-allow", "x"], "no ca-cert.pem"),
        (&["--tls-certificates", "/nonexistent"], "/nonexistent/server-cert.pem"),
        (&["--tls-certificates", fixture.anonymous.to_str().unwrap()], "anonymous/server-cert.pem"),
    ] {
        let address = format!("unix:{}", fixture.socket.display());
        let wrong = blockyard(["serve", "ram:1M", "--nbd", &address].iter().chain(options));
        assert!(
            !wrong.status.success() && wrong.err.contains(expected),
            "{expected}: {}",
            wrong.err
        );
    }
    // tls-allow is refused for a disk without an NBD export, with TLS or without it.
    let certificates = ["--tls-certificates", fixture.server.to_str().unwrap()];
    for tls in [&[][..], &certificates] {
        let socket = fixture.folder.join("vhost");
        let other = [
            "serve",
            "ram:1M",
            "--name",
            "vm2",
            "--tls-allow",
            "x",
            "--vhost-user",
            socket.to_str().unwrap(),
        ];
        let wrong = blockyard(other.iter().chain(tls));
        assert_eq!(wrong.status.code(), Some(2), "{}", wrong.err);
        assert!(
            wrong.err.contains("disk \"vm2\": tls-allow is for NBD clients, and the disk has no"),
            "{}",
            wrong.err
        );
    }
}

/// Reads and writes all bytes by three clients, with large requests.
#[test]
fn tls_transfers_the_same_data() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("tls-required = true");
    let (uri, copy, sum) =
        (fixture.uri("all", &fixture.vm1), fixture.folder.join("copy.raw"), md5(&fixture.disk));
    let copied = copy.to_str().unwrap();
    tool("nbdcopy", [&uri, copied]).good();
    assert_eq!(md5(&copy), sum);
    let _ = std::fs::remove_file(&copy);
    blockyard(["image", "convert", &uri, "-O", "raw", copied]).good();
    assert_eq!(md5(&copy), sum);
    std::fs::write(&copy, pattern(8, SIZE)).unwrap();
    tool("nbdcopy", ["--flush", copied, &uri]).good();
    let compared = blockyard(["image", "compare", &uri, copied, "-F", "raw"]);
    assert!(compared.out.contains("identical"), "{}{}", compared.out, compared.err);
    daemon.stop();
    assert_eq!(md5(&fixture.disk), md5(&copy));
}

/// The server ends the connection if bytes arrive between STARTTLS and the TLS handshake. It never
/// treats them as the client's.
#[test]
fn plain_bytes_after_starttls_end_the_connection() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("tls-required = true");
    let mut stream = UnixStream::connect(&fixture.socket).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut bytes = 3u32.to_be_bytes().to_vec();
    OptionHeader { option: opt::STARTTLS, len: 0 }.put(&mut bytes);
    OptionHeader { option: opt::LIST, len: 0 }.put(&mut bytes);
    stream.write_all(&bytes).unwrap();
    let mut answer = Vec::new();
    // The server disconnects without an answer.
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() <= OptionReply::BYTES, "{} bytes", answer.len());
    daemon.wait_log("plain bytes behind STARTTLS");
    // Before TLS, an option gets the error that TLS is required. After STARTTLS only TLS is
    // accepted.
    let mut stream = UnixStream::connect(&fixture.socket).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    for (option, reply) in
        [(opt::LIST, rep::ERR_TLS_REQD), (opt::GO, rep::ERR_TLS_REQD), (opt::STARTTLS, rep::ACK)]
    {
        let mut bytes = Vec::new();
        OptionHeader { option, len: 0 }.put(&mut bytes);
        stream.write_all(&bytes).unwrap();
        let mut header = [0; OptionReply::BYTES];
        stream.read_exact(&mut header).unwrap();
        let header = OptionReply::parse(&header).unwrap();
        assert_eq!((header.option, header.reply), (option, reply));
        stream.read_exact(&mut vec![0; header.len as usize]).unwrap();
    }
    let mut bytes = Vec::new();
    OptionHeader { option: opt::LIST, len: 0 }.put(&mut bytes);
    stream.write_all(&bytes).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() < 16, "an alert at most: {} bytes", answer.len());
    assert!(wire::u32_at(&[answer, vec![0; 4]].concat(), 0) != wire::OPTION_REPLY as u32);
    daemon.stop();
}

/// After NBD_CMD_DISC the server answers all requests and closes TLS before the connection. So the
/// client knows that the connection was not truncated.
#[test]
fn tls_is_closed_before_the_connection() {
    let fixture = TlsFixture::new();
    let daemon = fixture.serve("");
    for choose in [opt::GO, opt::ABORT] {
        let mut stream = UnixStream::connect(&fixture.socket).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        let mut bytes = 3u32.to_be_bytes().to_vec();
        OptionHeader { option: opt::STARTTLS, len: 0 }.put(&mut bytes);
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut [0; OptionReply::BYTES]).unwrap();
        let mut session = tls::client(&fixture.vm1, fixture.host).unwrap();
        let name = b"\0\0\0\x03all\0\0";
        let mut bytes = Vec::new();
        let data: &[u8] = if choose == opt::GO { name } else { b"" };
        OptionHeader { option: choose, len: data.len() as u32 }.put(&mut bytes);
        bytes.extend(data);
        if choose == opt::GO {
            for command in [cmd::FLUSH, cmd::DISC] {
                let request = Request { flags: 0, command, cookie: 7, offset: 0, len: 0 };
                request.put(Headers::Simple, &mut bytes);
            }
        }
        session.writer().write_all(&bytes).unwrap();
        let (mut received, mut ended) = (Vec::new(), None);
        while ended.is_none() {
            session.complete_io(&mut stream).unwrap();
            ended = match session.reader().read_to_end(&mut received) {
                Ok(_) => Some("TLS has ended".to_string()),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
                Err(e) => Some(e.to_string()),
            };
        }
        assert_eq!(ended.as_deref(), Some("TLS has ended"));
        let last = if choose == opt::GO { 16 } else { OptionReply::BYTES };
        let last = &received[received.len() - last..];
        match choose {
            opt::GO => {
                assert_eq!(SimpleReply::parse(last), Ok(SimpleReply { error: 0, cookie: 7 }))
            }
            _ => assert_eq!(OptionReply::parse(last).unwrap().reply, rep::ACK),
        }
        assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0);
    }
    daemon.stop();
}

/// Tests our client with QEMU's server, which is killed and restarted.
#[test]
fn a_remote_disk_reconnects_with_tls() {
    let fixture = TlsFixture::new();
    let start = || {
        let object = format!(
            "tls-creds-x509,id=t,endpoint=server,dir={},verify-peer=yes",
            fixture.server.display()
        );
        let options = ["--export-name=all", "--shared=4", "--object", &object, "--tls-creds=t"];
        Peer::start(&fixture.disk, &fixture.socket, &options)
    };
    let mut peer = start();
    let vhost = fixture.folder.join("s");
    let daemon = Daemon::serve(fixture.uri("all", &fixture.vm1), &vhost, &[]);
    let mut guest = Guest::connect(&vhost);
    let whole = pattern(3, SIZE);
    for round in 0..3u64 {
        for at in (0..SIZE).step_by(256 << 10) {
            assert!(
                guest.read(at as u64 / 512, 256 << 10).unwrap() == whole[at..at + (256 << 10)],
                "{round} {at}"
            );
        }
        assert_eq!(guest.write(0, &whole[..4096]), 0);
        assert_eq!(guest.flush(), 0);
        let from = daemon.log().len();
        drop(peer);
        daemon.wait_log_after(from, "connecting again");
        peer = start();
    }
    // The client also reconnects if no request is in flight, after a connection that worked.
    assert!(guest.read(0, 4096).unwrap() == whole[..4096]);
    until("it has logged all three", SOON, || daemon.log().matches("connected again").count() >= 3);
    let from = daemon.log().len();
    drop(peer);
    daemon.wait_log_after(from, "connecting again");
    let _peer = start();
    daemon.wait_log_after(from, "connected again");
    let before = daemon.log().matches("connecting again").count();
    assert!(guest.read(0, 4096).unwrap() == whole[..4096]);
    let refused = blockyard(["image", "info", &fixture.uri("all", &fixture.anonymous)]);
    assert!(refused.err.contains("blockyard: image"), "{}", refused.err);
    drop(guest);
    let log = daemon.stop();
    let missed = "the request was the one to miss it";
    assert_eq!(log.matches("connecting again").count(), before, "{missed}: {log}");
}
