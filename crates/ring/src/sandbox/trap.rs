//! The end of the process when a thread makes a system call that its filter refuses.
//!
//! In: SIGSYS, which the kernel raises instead of the call. Out: one line on standard error with
//! the number of the call and the name of the thread, and the exit status [`STATUS`]. What must
//! hold: the handler allocates nothing, takes no lock, and waits at most 100 ms for the reader of
//! standard error.

use std::io;

/// Exit status after a refused system call: 128 and the number of SIGSYS, as shells report it.
pub const STATUS: i32 = 128 + libc::SIGSYS;

/// Longest wait for the reader of standard error, in milliseconds.
const PATIENCE: libc::c_int = 100;

/// Installs the handler.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid value of this plain C struct.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_refusal as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the struct outlives the call; the handler is async-signal-safe.
    let rc = unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_refusal(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // The layout of siginfo for SIGSYS: three integers, padding to the alignment of a pointer, the
    // address of the call, its number, and its architecture.
    #[repr(C)]
    struct Refusal {
        header: [libc::c_int; 3],
        address: *mut libc::c_void,
        number: libc::c_int,
        architecture: libc::c_uint,
    }
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler. It is larger than
    // `Refusal`, and has this layout for SIGSYS.
    let number = unsafe { (*info.cast::<Refusal>()).number };
    let mut thread = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, the size of `thread`.
    unsafe { libc::prctl(libc::PR_GET_NAME, thread.as_mut_ptr()) };
    let mut line = Line::default();
    line.push(b"blockyard: sandbox: thread ");
    line.push(thread.split(|byte| *byte == 0).next().unwrap_or_default());
    line.push(b" made system call ");
    line.push_number(number);
    line.push(b", which it may not make; the server ends (see docs/sandbox.md)\n");
    let mut ready = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `ready` is one pollfd, and the text is ours. Nothing runs after `_exit`.
    unsafe {
        if libc::poll(&mut ready, 1, PATIENCE) > 0 {
            libc::write(libc::STDERR_FILENO, line.text.as_ptr().cast(), line.len);
        }
        libc::_exit(STATUS);
    }
}

/// A line of text without allocation.
struct Line {
    text: [u8; 256],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Line { text: [0; 256], len: 0 }
    }
}

impl Line {
    /// Appends as much of the text as fits.
    fn push(&mut self, text: &[u8]) {
        let room = &mut self.text[self.len..];
        let len = text.len().min(room.len());
        room[..len].copy_from_slice(&text[..len]);
        self.len += len;
    }

    fn push_number(&mut self, number: i32) {
        let (mut digits, mut at, mut rest) = ([0; 10], 10, number.unsigned_abs());
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if number < 0 {
            self.push(b"-");
        }
        self.push(&digits[at..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_numbers_and_a_bounded_length() {
        let mut line = Line::default();
        for number in [0, 435, -1, i32::MIN] {
            line.push_number(number);
            line.push(b" ");
        }
        assert_eq!(&line.text[..line.len], b"0 435 -1 -2147483648 ");
        line.push(&[b'x'; 300]);
        assert_eq!(line.len, 256);
    }
}
