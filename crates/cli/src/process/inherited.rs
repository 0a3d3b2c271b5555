//! Inherited sockets: systemd's socket activation (sd_listen_fds(3)), or a descriptor of the parent
//! process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, bail};
use blockyard_export::keeper::{self, Store};
use blockyard_ring::inherited::{self, Claim};
use blockyard_ring::parcel;

/// Returns the socket of `fd:NAME` or `fd:NUMBER`. `text`: the part after `fd:`.
pub fn socket(text: &str) -> anyhow::Result<(OwnedFd, Claim)> {
    inherited::take(number(text)?)
        .with_context(|| format!("fd:{text}: this descriptor is not an inherited listening socket"))
}

/// Returns an error if [`socket`] would fail for another reason than that the socket is in use.
pub fn check(text: &str) -> anyhow::Result<()> {
    if !inherited::has(number(text)?) {
        bail!("fd:{text}: this process did not inherit the descriptor");
    }
    Ok(())
}

fn number(text: &str) -> anyhow::Result<i32> {
    match text.parse::<i32>() {
        Ok(number) if number >= 3 => Ok(number),
        Ok(number) => bail!("fd:{number}: inherited sockets begin at descriptor 3"),
        Err(_) => named(text),
    }
}

/// Returns the parcels that systemd's store has for this process, by name.
pub fn stored() -> io::Result<Vec<(String, OwnedFd)>> {
    let var = |key| std::env::var(key).unwrap_or_default();
    if var("LISTEN_PID") != std::process::id().to_string() {
        return Ok(Vec::new());
    }
    let count: usize = var("LISTEN_FDS").parse().unwrap_or(0);
    let names = var("LISTEN_FDNAMES");
    let stored = names.split(':').take(count).enumerate().filter(|(_, name)| Store::is_name(name));
    stored.map(|(at, name)| Ok((name.into(), inherited::take_any(3 + at as i32)?))).collect()
}

/// Returns the descriptor of a name in LISTEN_FDNAMES.
fn named(name: &str) -> anyhow::Result<i32> {
    let var = |key| std::env::var(key).unwrap_or_default();
    // The holder (serve --keep-sessions) has inherited the sockets, and passes them on.
    let pids = [std::process::id(), std::os::unix::process::parent_id()];
    let pids = &pids[..if keeper::is_on() { 2 } else { 1 }];
    if !pids.iter().any(|pid| var("LISTEN_PID") == pid.to_string()) {
        bail!("fd:{name}: no sockets were passed to this process (LISTEN_PID is not its own)");
    }
    place(name, &var("LISTEN_FDNAMES"), var("LISTEN_FDS").parse().unwrap_or(0))
}

/// Returns the descriptor of a name in a list of names. `count`: the number of descriptors.
fn place(name: &str, names: &str, count: usize) -> anyhow::Result<i32> {
    let mut places = names.split(':').take(count).enumerate().filter(|(_, n)| *n == name);
    let Some((at, _)) = places.next() else {
        bail!("fd:{name}: no inherited socket has this name; the names are \"{names}\"");
    };
    if let Some((other, _)) = places.next() {
        bail!(
            "fd:{name}: the descriptors {} and {} have this name: give each socket a name of its \
             own (FileDescriptorName=), or remove one (an empty ListenStream= before the other)",
            3 + at,
            3 + other
        );
    }
    Ok(3 + at as i32)
}

/// Returns the connection that another process has passed as standard input.
pub fn connection() -> io::Result<OwnedFd> {
    let stdin = io::stdin();
    let socket = stdin.as_fd().try_clone_to_owned()?;
    rustix::net::sockopt::socket_type(&socket)?;
    parcel::replace(&stdin, File::open("/dev/null")?.as_fd())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_one_socket() {
        assert_eq!(place("nbd", "disk:nbd:api", 3).unwrap(), 4);
        let wrong = |name, names, count| place(name, names, count).unwrap_err().to_string();
        assert!(wrong("nbd", "disk:api", 2).contains("the names are \"disk:api\""));
        assert!(wrong("api", "disk:api", 1).contains("no inherited socket has this name"));
        let twice = wrong("nbd", "nbd:disk:nbd", 3);
        assert!(twice.contains("the descriptors 3 and 5 have this name"), "{twice}");
        // The last name has no descriptor.
        assert_eq!(place("nbd", "nbd:disk:nbd", 2).unwrap(), 3);
    }
}
