//! The user that a server runs as, and its capabilities, if root started it.
//!
//! In: the name or number of a user; or what a server does that stays root. Out: a process with
//! that user, the user's groups, and no capabilities; or root's process with few capabilities.
//! What must hold: all threads change together (the C library sees to that for the user;
//! capabilities change before there are other threads), and the process cannot change back.

use std::ffi::CString;
use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};

/// Capabilities of a server that stays root: files and sockets of other users, ports below 1024,
/// locked memory, limits.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_RESOURCE);

/// A user of this host.
struct User {
    name: CString,
    id: libc::uid_t,
    group: libc::gid_t,
}

/// Returns the user with this name or number, or `None` if there is none.
fn find(text: &str) -> io::Result<Option<User>> {
    // SAFETY: an all-zero entry is a valid value of this plain C struct.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut space = vec![0; 1 << 16];
    let mut found = std::ptr::null_mut();
    let name = CString::new(text)?;
    let (to, len) = (space.as_mut_ptr(), space.len());
    let rc = match text.parse::<libc::uid_t>() {
        // SAFETY: the function writes to `entry`, `found`, and at most `len` bytes to `space`,
        // which are ours and outlive the call.
        Ok(id) => unsafe { libc::getpwuid_r(id, &mut entry, to, len, &mut found) },
        // SAFETY: as above; `name` ends with a zero byte.
        Err(_) => unsafe { libc::getpwnam_r(name.as_ptr(), &mut entry, to, len, &mut found) },
    };
    if rc != 0 {
        return Err(io::Error::from_raw_os_error(rc));
    }
    if found.is_null() {
        return Ok(None);
    }
    // SAFETY: a found entry has a name, which ends with a zero byte and lies in `space`.
    let name = unsafe { std::ffi::CStr::from_ptr(entry.pw_name) }.to_owned();
    Ok(Some(User { name, id: entry.pw_uid, group: entry.pw_gid }))
}

/// Returns whether this host has a user with this name or number.
pub fn exists(text: &str) -> io::Result<bool> {
    Ok(find(text)?.is_some())
}

/// Makes this process run as another user, for good. Does nothing if it runs as that user.
pub fn become_user(text: &str) -> io::Result<()> {
    let user = find(text)?;
    let user = user.ok_or_else(|| io::Error::other("this host has no such user"))?;
    if rustix::process::geteuid().as_raw() == user.id && user.id != 0 {
        return Ok(());
    }
    let done = |rc: libc::c_int| if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the arguments are a string that ends with a zero byte, and plain numbers.
    unsafe {
        done(libc::initgroups(user.name.as_ptr(), user.group))?;
        done(libc::setresgid(user.group, user.group, user.group))?;
        done(libc::setresuid(user.id, user.id, user.id))?;
        // The kernel clears the mark at a change of users. With the mark, the user's other programs
        // see which files this process has locked.
        done(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0))
    }
}

/// Returns whether this process runs as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Gives up all capabilities of this process for good, except those that a server needs.
/// `devices`: it also makes block devices (ublk, Xen, the kernel's NBD client).
pub fn keep_few_capabilities(devices: bool) -> io::Result<()> {
    let kept = if devices { KEPT | CapabilitySet::SYS_ADMIN } else { KEPT };
    let kept = rustix::thread::capabilities(None)?.permitted & kept;
    let inheritable = CapabilitySet::empty();
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_that_no_server_needs_are_given_up() {
        let held = std::thread::spawn(|| {
            keep_few_capabilities(false).unwrap();
            rustix::thread::capabilities(None).unwrap()
        });
        let held = held.join().unwrap();
        assert!(KEPT.contains(held.permitted) && held.effective == held.permitted);
        assert!(held.inheritable.is_empty());
    }

    #[test]
    fn users_are_found_by_name_and_by_number() {
        for text in ["root", "0"] {
            let user = find(text).unwrap().unwrap();
            assert_eq!((user.name.to_str(), user.id, user.group), (Ok("root"), 0, 0));
        }
        assert!(find("no such user").unwrap().is_none());
        assert!(become_user("no such user").is_err());
    }
}
