//! NBD URIs, in the syntax of the NBD project's uri.md.
//!
//! In: text from a person or from an image's header. Out: the server's address and the export's
//! name; and the text of a URI. What must hold: an unknown part is an error, and is never ignored.

use std::fmt;
use std::path::PathBuf;

use crate::error::{NbdError, NbdErrorKind};
use crate::wire::{MOST_STRING, PORT};

/// The forms of a URI, for messages.
pub const FORMS: &str =
    "nbd://HOST[:PORT][/EXPORT] or nbd+unix:///[EXPORT]?socket=PATH (nbds: with TLS)";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Uri {
    pub host: Host,
    pub export: String,
    pub tls: bool,
    /// The folder of certificates and keys, and the name that the server's certificate must have.
    pub tls_certificates: Option<PathBuf>,
    pub tls_hostname: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    Tcp(String, u16),
    Unix(PathBuf),
}

const SCHEMES: [(&str, bool, bool); 4] = [
    // Columns: the scheme, whether it uses TLS, and whether it uses a Unix socket.
    ("nbd", false, false),
    ("nbds", true, false),
    ("nbd+unix", false, true),
    ("nbds+unix", true, true),
];

/// Returns whether a name has a scheme of NBD. It may still be a wrong URI.
pub fn is_uri(name: &str) -> bool {
    name.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
}

impl Uri {
    pub fn parse(text: &str) -> Result<Self, NbdError> {
        let wrong = |what: &dyn fmt::Display| {
            NbdError::new(NbdErrorKind::Name, format!("{what}: say {FORMS}"))
                .about(format!("\"{text}\""))
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong(&"it is no NBD URI"))?;
        let known = SCHEMES.iter().find(|(name, ..)| *name == scheme);
        let (_, tls, unix) =
            known.ok_or_else(|| wrong(&format_args!("the scheme \"{scheme}\" is not known")))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if rest.contains('#') || query.contains('#') {
            return Err(wrong(&"it has a fragment (write # as %23)"));
        }
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(export).map_err(|part| wrong(&part))?;
        if export.len() > MOST_STRING || export.contains('\0') {
            return Err(wrong(&"its export's name is none"));
        }
        let (mut socket, mut tls_certificates, mut tls_hostname) = (None, None, None);
        for item in query.split('&').filter(|item| !item.is_empty()) {
            let (key, value) = item.split_once('=').unwrap_or((item, ""));
            let value = decode(value).map_err(|part| wrong(&part))?;
            if value.is_empty() || value.contains('\0') {
                return Err(wrong(&format_args!("{key} has no value")));
            }
            let known = match key {
                "socket" if *unix => &mut socket,
                "tls-certificates" if *tls => &mut tls_certificates,
                "tls-hostname" if *tls => &mut tls_hostname,
                _ => return Err(wrong(&format_args!("its parameter \"{key}\" is not known here"))),
            };
            if known.replace(value).is_some() {
                return Err(wrong(&format_args!("{key} is said twice")));
            }
        }
        let host = if *unix {
            let socket = socket.ok_or_else(|| wrong(&"the socket is missing"))?;
            if !authority.is_empty() {
                return Err(wrong(&"a Unix socket has no host"));
            }
            Host::Unix(socket.into())
        } else {
            tcp(authority).map_err(|part| wrong(&part))?
        };
        let tls_certificates = tls_certificates.map(PathBuf::from);
        Ok(Uri { host, export, tls: *tls, tls_certificates, tls_hostname })
    }

    /// Returns the URI of all exports of the same server, for messages. FOLDER stands
    /// for the folder of certificates.
    pub fn whole_server(&self) -> Uri {
        let folder = || self.tls.then(|| "FOLDER".into());
        Uri {
            export: String::new(),
            tls_certificates: self.tls_certificates.clone().or_else(folder),
            ..self.clone()
        }
    }

    /// Returns `other`, with this URI's TLS settings if it has none.
    pub fn complete(&self, other: &Uri) -> Uri {
        let tls_certificates =
            other.tls_certificates.clone().or_else(|| self.tls_certificates.clone());
        let tls_hostname = other.tls_hostname.clone().or_else(|| self.tls_hostname.clone());
        Uri { tls_certificates, tls_hostname, ..other.clone() }
    }

    /// Returns whether an operator who allows this URI allows `other`: the same server and
    /// transport, and the same export or one below it as a path. `other` may lack TLS settings.
    pub fn takes_in(&self, other: &Uri) -> bool {
        let same = Uri { export: other.export.clone(), ..self.clone() } == self.complete(other);
        let export = self.export.trim_end_matches('/');
        same && (export.is_empty()
            || other
                .export
                .strip_prefix(export)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    }
}

/// What is wrong with a part of a URI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum PartError {
    #[error("the port must be 1 to 65535")]
    Port,
    #[error("the host is no name and no address")]
    Host,
    #[error("a % is not followed by two hexadecimal digits")]
    Escape,
    #[error("it is not UTF-8")]
    Encoding,
}

/// Splits a host and an optional port. An IPv6 address is in brackets.
fn tcp(authority: &str) -> Result<Host, PartError> {
    let (name, port) = match authority.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
        Some((name, port)) => {
            (name, port.parse().ok().filter(|port| *port > 0).ok_or(PartError::Port)?)
        }
        None => (authority, PORT),
    };
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let good = match bare {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
        }
    };
    if good { Ok(Host::Tcp(bare.unwrap_or(name).into(), port)) } else { Err(PartError::Host) }
}

/// Decodes %XX to bytes.
fn decode(text: &str) -> Result<String, PartError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = more
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .filter(|hex| !hex.starts_with('+'));
        let byte = digits.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(byte.ok_or(PartError::Escape)?);
        rest = &more[2..];
    }
    String::from_utf8(bytes).map_err(|_| PartError::Encoding)
}

/// Encodes text for [`decode`]. `plain`: characters that stay, in addition to letters and digits.
fn encode(f: &mut fmt::Formatter<'_>, text: &str, plain: &str) -> fmt::Result {
    for byte in text.bytes() {
        match char::from(byte) {
            c if c.is_ascii_alphanumeric() || plain.contains(c) => write!(f, "{c}")?,
            _ => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

const PLAIN: &str = "-._~/:@,+";

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unix = matches!(self.host, Host::Unix(_));
        let scheme = SCHEMES.iter().find(|(_, tls, is_unix)| (*tls, *is_unix) == (self.tls, unix));
        write!(f, "{}://", scheme.map_or("", |(name, ..)| name))?;
        let mut query = Vec::new();
        match &self.host {
            Host::Tcp(name, port) => {
                if name.contains(':') {
                    write!(f, "[{name}]")?
                } else {
                    write!(f, "{name}")?
                }
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
            }
            Host::Unix(path) => query.push(("socket", path.to_string_lossy())),
        }
        f.write_str("/")?;
        encode(f, &self.export, PLAIN)?;
        query.extend(
            self.tls_certificates.iter().map(|path| ("tls-certificates", path.to_string_lossy())),
        );
        query.extend(self.tls_hostname.iter().map(|name| ("tls-hostname", name.as_str().into())));
        for (number, (key, value)) in query.iter().enumerate() {
            write!(f, "{}{key}=", if number == 0 { "?" } else { "&" })?;
            encode(f, value, PLAIN)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(name: &str, port: u16, export: &str) -> Uri {
        let (tls, tls_certificates, tls_hostname) = Default::default();
        Uri {
            host: Host::Tcp(name.into(), port),
            export: export.into(),
            tls,
            tls_certificates,
            tls_hostname,
        }
    }

    fn unix(path: &str, export: &str) -> Uri {
        Uri { host: Host::Unix(path.into()), ..tcp("", 0, export) }
    }

    #[test]
    fn what_is_written_is_read() {
        let secret = Uri {
            tls: true,
            tls_certificates: Some("/etc/pki & more".into()),
            tls_hostname: Some("host.example".into()),
            ..tcp("10.0.0.1", 5000, "x")
        };
        let all = [
            ("nbd://host", "nbd://host/", tcp("host", PORT, "")),
            ("nbd://host:1/a/b", "nbd://host:1/a/b", tcp("host", 1, "a/b")),
            ("nbd://[::1]/x", "nbd://[::1]/x", tcp("::1", PORT, "x")),
            ("nbd://[fe80::1]:7", "nbd://[fe80::1]:7/", tcp("fe80::1", 7, "")),
            ("nbd://h//x", "nbd://h//x", tcp("h", PORT, "/x")),
            ("nbd://h/%c3%a4%20%3F%23%25", "nbd://h/%C3%A4%20%3F%23%25", tcp("h", PORT, "ä ?#%")),
            ("nbd+unix:///?socket=/run/s", "nbd+unix:///?socket=/run/s", unix("/run/s", "")),
            ("nbd+unix:///x?socket=/a%26b", "nbd+unix:///x?socket=/a%26b", unix("/a&b", "x")),
            (
                "nbds://10.0.0.1:5000/x?tls-hostname=host.example\
                 &tls-certificates=/etc/pki%20%26%20more",
                "nbds://10.0.0.1:5000/x?tls-certificates=/etc/pki%20%26%20more\
                 &tls-hostname=host.example",
                secret,
            ),
            (
                "nbds+unix:///?socket=s",
                "nbds+unix:///?socket=s",
                Uri { tls: true, ..unix("s", "") },
            ),
        ];
        for (text, again, uri) in all {
            assert_eq!(Uri::parse(text).unwrap(), uri, "{text}");
            assert_eq!(uri.to_string(), again);
            assert_eq!(Uri::parse(again).unwrap(), uri);
        }
    }

    #[test]
    fn what_an_operator_is_told_to_allow() {
        for (export, server) in [
            ("nbd://h/a/b", "nbd://h/"),
            ("nbds://h/a", "nbds://h/?tls-certificates=FOLDER"),
            ("nbds://h/a?tls-certificates=/etc/pki", "nbds://h/?tls-certificates=/etc/pki"),
        ] {
            assert_eq!(Uri::parse(export).unwrap().whole_server().to_string(), server);
        }
    }

    #[test]
    fn what_is_none_is_refused() {
        let long = format!("nbd://h/{}", "x".repeat(MOST_STRING + 1));
        for bad in [
            "",
            "file",
            "nbd:unix:/s",
            "nbd://",
            "nbd://:1",
            "nbd://h:x",
            "nbd://h:0",
            "nbd://h:65536",
            "nbd://user@h/x",
            "nbd://[::1/x",
            "nbd://::1/x",
            "nbd://[h]/x",
            "nbd://h/x#y",
            "nbd://h/x?socket=/s",
            "nbd://h/x?tls-certificates=/c",
            "nbd://h/%2",
            "nbd://h/%+1",
            "nbd://h/%ff",
            "nbd://h/%00",
            "nbd+unix:///x",
            "nbd+unix:///x?socket=",
            "nbd+unix:///x?socket=a&socket=b",
            "nbd+unix://h/x?socket=/s",
            "nbd+unix:///x?socket=/s&reconnect-delay=1",
            "nbd+vsock://1/x",
            "nbds+ssh://h/x",
            &long,
        ] {
            let error = Uri::parse(bad).expect_err(bad);
            assert_eq!(error.kind, NbdErrorKind::Name);
            let error = error.to_string();
            assert!(error.contains("nbd+unix:///[EXPORT]?socket=PATH"), "{error}");
        }
    }

    #[test]
    fn what_an_operator_allows() {
        let of = |text: &str| Uri::parse(text).unwrap();
        for (allowed, name, is) in [
            ("nbd://h", "nbd://h/x", true),
            ("nbd://h", "nbd://h:10809", true),
            ("nbd://h", "nbd://h:1/x", false),
            ("nbd://h", "nbd://h2/x", false),
            ("nbd://h", "nbds://h/x", false),
            ("nbd://h/a", "nbd://h/a", true),
            ("nbd://h/a/", "nbd://h/a/b", true),
            ("nbd://h/a", "nbd://h/ab", false),
            ("nbd://h/a", "nbd://h/", false),
            ("nbd+unix:///?socket=/s", "nbd+unix:///x?socket=/s", true),
            ("nbd+unix:///?socket=/s", "nbd+unix:///x?socket=/s2", false),
            ("nbds://h", "nbds://h/x?tls-certificates=/elsewhere", false),
            ("nbds://h/?tls-certificates=/c", "nbds://h/x?tls-certificates=/c", true),
            ("nbds://h/?tls-certificates=/c", "nbds://h/x", true),
            ("nbds://h/?tls-certificates=/c", "nbds://h/x?tls-hostname=other", false),
            ("nbds://h/?tls-certificates=/c", "nbd://h/x", false),
        ] {
            assert_eq!(of(allowed).takes_in(&of(name)), is, "{allowed} {name}");
        }
    }
}
