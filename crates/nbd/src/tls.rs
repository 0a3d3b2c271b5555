//! TLS for both sides: certificates from a folder, and the identity of the peer.
//!
//! In: a folder with the file names that QEMU and nbdkit use (`ca-cert.pem`, `ca-crl.pem`,
//! `server-cert.pem`, `server-key.pem`, `client-cert.pem`, `client-key.pem`). Out: sessions, and
//! the names of a peer's certificate. What must hold: a server must have a certificate that
//! `ca-cert.pem` has signed, for its own name; a client's names come only from a verified
//! certificate. (rustls has no pre-shared keys.)

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_ring::small_file;
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};

use crate::error::{NbdError, NbdErrorKind};

const AUTHORITIES: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// The certificate files of a folder.
struct Folder<'a>(&'a Path);

impl Folder<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn wrong(&self, name: &str, what: impl Into<Box<dyn Error + Send + Sync>>) -> NbdError {
        NbdError::of(NbdErrorKind::Tls, what).about(format!("TLS: {}", self.path(name).display()))
    }

    fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, NbdError> {
        small_file::read(&self.path(name))
            .map_err(|e| NbdError::of(NbdErrorKind::Tls, e).about("TLS"))
    }

    fn all<T: PemObject>(&self, name: &str) -> Result<Vec<T>, NbdError> {
        let bytes = self.read(name)?;
        let all: Result<Vec<_>, _> = T::pem_slice_iter(&bytes).collect();
        let all = all.map_err(|e| self.wrong(name, e))?;
        if all.is_empty() {
            Err(self.wrong(name, "there is nothing of that kind in it"))
        } else {
            Ok(all)
        }
    }

    fn authorities(&self) -> Result<Arc<RootCertStore>, NbdError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.all::<CertificateDer<'static>>(AUTHORITIES)? {
            roots.add(certificate).map_err(|e| self.wrong(AUTHORITIES, e))?;
        }
        Ok(Arc::new(roots))
    }

    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, NbdError> {
        if self.has(REVOKED) { self.all(REVOKED) } else { Ok(Vec::new()) }
    }

    /// Returns the error about a certificate and its key.
    fn mismatched(&self, who: &str, error: rustls::Error) -> NbdError {
        let certificate = format!("{who}-cert.pem");
        match error {
            rustls::Error::InconsistentKeys(_) => {
                self.wrong(&certificate, format!("{who}-key.pem is not its key"))
            }
            other => self.wrong(&certificate, other),
        }
    }

    /// Reads the certificates and the key of one side (`who`: server or client).
    fn own(
        &self,
        who: &str,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), NbdError> {
        let (certificate, key) = (format!("{who}-cert.pem"), format!("{who}-key.pem"));
        let certificates = self.all(&certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&self.read(&key)?).map_err(|e| match e {
            rustls::pki_types::pem::Error::NoItemsFound => {
                self.wrong(&key, "there is no private key in it")
            }
            e => self.wrong(&key, e),
        })?;
        Ok((certificates, key))
    }
}

fn tls(what: impl Into<Box<dyn Error + Send + Sync>>) -> NbdError {
    NbdError::of(NbdErrorKind::Tls, what).about("TLS")
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Creates a client's session with the server of that name. The client sends its own certificate if
/// the folder has one.
pub fn client(folder: &Path, server: &str) -> Result<ClientConnection, NbdError> {
    let folder = Folder(folder);
    let name = ServerName::try_from(server.to_string()).map_err(|_| {
        tls(format!("\"{server}\" is no name that a certificate can have: say tls-hostname"))
    })?;
    let verifier = WebPkiServerVerifier::builder_with_provider(folder.authorities()?, provider())
        .with_crls(folder.revoked()?)
        .build()
        .map_err(|e| folder.wrong(AUTHORITIES, e))?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(tls)?
        .with_webpki_verifier(verifier);
    let config = if folder.has("client-cert.pem") {
        let (certificates, key) = folder.own("client")?;
        builder
            .with_client_auth_cert(certificates, key)
            .map_err(|e| folder.mismatched("client", e))?
    } else {
        builder.with_no_client_auth()
    };
    ClientConnection::new(Arc::new(config), name).map_err(tls)
}

/// TLS settings of a server.
#[derive(Debug)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    /// Clients without TLS are refused.
    pub required: bool,
}

impl ServerTls {
    /// Loads the certificates of a server from `folder`. `verify_peer`: clients must have a
    /// certificate signed by the CA in `ca-cert.pem`. Without `verify_peer` a certificate is
    /// optional, and verified if the client sends one and the folder has that file.
    pub fn open(folder: &Path, required: bool, verify_peer: bool) -> Result<Self, NbdError> {
        let folder = Folder(folder);
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(tls)?;
        let builder = if verify_peer || folder.has(AUTHORITIES) {
            let verifier =
                WebPkiClientVerifier::builder_with_provider(folder.authorities()?, provider())
                    .with_crls(folder.revoked()?);
            let verifier = if verify_peer { verifier } else { verifier.allow_unauthenticated() };
            builder.with_client_cert_verifier(
                verifier.build().map_err(|e| folder.wrong(AUTHORITIES, e))?,
            )
        } else {
            builder.with_no_client_auth()
        };
        let (certificates, key) = folder.own("server")?;
        let mut config = builder
            .with_single_cert(certificates, key)
            .map_err(|e| folder.mismatched("server", e))?;
        // No session can be resumed, because a resumed one does not verify the client's certificate
        // again, which may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(ServerTls { config: Arc::new(config), required })
    }

    pub fn session(&self) -> Result<Connection, NbdError> {
        ServerConnection::new(self.config.clone()).map(Connection::Server).map_err(tls)
    }
}

/// Returns the names in the peer's verified certificate: DNS names, and the subject's common name.
pub fn names(session: &Connection) -> Vec<String> {
    let Some([certificate, ..]) = session.peer_certificates() else { return Vec::new() };
    let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else { return Vec::new() };
    let mut names: Vec<_> = parsed.valid_dns_names().map(str::to_string).collect();
    names.extend(common_names(parsed.subject()));
    names
}

/// Returns the common names of a subject: `SET { SEQUENCE { OID, string } }`, repeated (DER).
fn common_names(mut subject: &[u8]) -> Vec<String> {
    const SEQUENCE: u8 = 0x30;
    const SET: u8 = 0x31;
    const OID: u8 = 6;
    const STRINGS: [u8; 3] = [12, 19, 22];
    const COMMON_NAME: [u8; 3] = [0x55, 4, 3];
    let mut names = Vec::new();
    // In some certificates a SEQUENCE encloses the sets of the subject.
    if let Some((SEQUENCE, inner, [])) = element(subject) {
        subject = inner;
    }
    while let Some((SET, mut set, rest)) = element(subject) {
        subject = rest;
        while let Some((SEQUENCE, pair, rest)) = element(set) {
            set = rest;
            if let Some((OID, kind, value)) = element(pair)
                && kind == COMMON_NAME
                && let Some((tag, text, [])) = element(value)
                && STRINGS.contains(&tag)
                && let Ok(text) = std::str::from_utf8(text)
            {
                names.push(text.to_string());
            }
        }
    }
    names
}

/// Splits DER bytes into the first element's tag, its content, and the rest.
fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let [tag, len, rest @ ..] = bytes else { return None };
    let (len, rest) = match *len {
        short @ 0..=0x7f => (usize::from(short), rest),
        0x81 => (usize::from(*rest.first()?), &rest[1..]),
        0x82 => (usize::from(*rest.first()?) << 8 | usize::from(*rest.get(1)?), &rest[2..]),
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    Some((*tag, content, rest))
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::HandshakeKind;
    use rustls::version::{TLS12, TLS13};

    use super::*;

    /// Passes all pending bytes of one side to the other.
    fn carry(from: &mut Connection, to: &mut Connection) {
        let mut records = Vec::new();
        while from.wants_write() {
            from.write_tls(&mut records).unwrap();
        }
        let mut records = &records[..];
        while !records.is_empty() {
            to.read_tls(&mut records).unwrap();
            to.process_new_packets().unwrap();
        }
    }

    /// Only a handshake verifies a certificate, so each connection has a full handshake.
    #[test]
    fn a_client_that_comes_again_shows_its_certificate_again() {
        let folder = std::env::temp_dir().join(format!("blockyard-tls-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let write = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
        write(AUTHORITIES, authority.pem());
        for who in ["server", "client"] {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(vec!["localhost".into()])
                .unwrap()
                .signed_by(&key, &authority);
            write(&format!("{who}-cert.pem"), certificate.unwrap().pem());
            write(&format!("{who}-key.pem"), key.serialize_pem());
        }
        let key = std::fs::read_to_string(folder.join("server-key.pem")).unwrap();
        write("server-key.pem", authority.pem());
        let error = ServerTls::open(&folder, true, true).unwrap_err().to_string();
        assert!(error.ends_with("server-key.pem: there is no private key in it"), "{error}");
        std::fs::remove_file(folder.join("server-key.pem")).unwrap();
        let path = folder.join("server-key.pem");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let error = ServerTls::open(&folder, true, true).unwrap_err().to_string();
        assert!(error.contains("server-key.pem: cannot read it: it is a pipe"), "{error}");
        std::fs::remove_file(&path).unwrap();
        write("server-key.pem", key);
        let server = ServerTls::open(&folder, true, true).unwrap();
        for version in [&TLS12, &TLS13] {
            let (roots, own) =
                (Folder(&folder).authorities().unwrap(), Folder(&folder).own("client").unwrap());
            let client = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(&[version])
                .unwrap();
            let client = Arc::new(
                client.with_root_certificates(roots).with_client_auth_cert(own.0, own.1).unwrap(),
            );
            for time in 0..3 {
                let name = ServerName::try_from("localhost").unwrap();
                let mut client =
                    Connection::Client(ClientConnection::new(client.clone(), name).unwrap());
                let mut server = server.session().unwrap();
                for _ in 0..4 {
                    carry(&mut client, &mut server);
                    carry(&mut server, &mut client);
                }
                assert!(!server.is_handshaking() && !client.is_handshaking());
                assert_eq!(
                    server.handshake_kind(),
                    Some(HandshakeKind::Full),
                    "{version:?}, time {time}"
                );
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn common_names_are_found_where_they_are_and_nowhere_else() {
        let of = |tag: u8, kind: [u8; 3], text: &[u8]| {
            let mut pair = vec![6, 3];
            pair.extend(kind);
            pair.extend([tag, text.len() as u8]);
            pair.extend(text);
            let mut set = vec![0x31, pair.len() as u8 + 2, 0x30, pair.len() as u8];
            set.extend(pair);
            set
        };
        let cn = [0x55, 4, 3];
        let hidden = of(12, cn, b"admin");
        let subject = [
            of(12, [0x55, 4, 10], &hidden),
            of(19, cn, b"vm1"),
            of(12, cn, b"vm2"),
            of(4, cn, b"no"),
        ]
        .concat();
        assert_eq!(common_names(&subject), ["vm1", "vm2"]);
        let whole = [&[0x30, 0x81, subject.len() as u8], &subject[..]].concat();
        assert_eq!(common_names(&whole), ["vm1", "vm2"]);
        for cut in 0..subject.len() {
            // A truncated subject causes no panic, and no name has bytes from behind its end.
            assert!(common_names(&subject[..cut]).len() <= 2);
        }
    }
}
