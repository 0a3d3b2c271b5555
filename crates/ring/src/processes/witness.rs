//! A second process that sees what the sandbox hides from the server: which processes have a file
//! open.
//!
//! Landlock hides the open files of other processes (`/proc/PID/fd`). But a server names the
//! process that holds an image's lock, and must know whether that process still lives. So the
//! server starts this process before it enters its sandbox.
//!
//! In: questions of the server on a socket, each a few bytes. Out: an answer to each, a short
//! text.
//!
//! What must hold
//! - The witness receives numbers only, and returns names of processes. It cannot write files.
//! - It ends with the server, because the server's end of the socket closes.
//! - A server without a witness looks itself.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::sandbox::{self, Kind};

/// Argument with which the program starts as a witness.
pub const ARGUMENT: &str = "--witness";

/// Longest wait for an answer. A folder of /proc is read at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest answer in bytes.
const MAX_ANSWER: u16 = 4096;

static WITNESS: Mutex<Option<UnixStream>> = Mutex::new(None);

/// A question: its kind, and two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub kind: u8,
    pub numbers: [u64; 2],
}

impl Question {
    const BYTES: usize = 17;

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = self.kind;
        bytes[1..9].copy_from_slice(&self.numbers[0].to_le_bytes());
        bytes[9..].copy_from_slice(&self.numbers[1].to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let number = |from: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[from + at]));
        Question { kind: bytes[0], numbers: [number(1), number(9)] }
    }
}

/// Starts the witness of this process.
pub fn start() -> io::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(PATIENCE))?;
    Command::new("/proc/self/exe")
        // An administrator looks for this name in the list of processes.
        .arg0("blockyard")
        .arg(ARGUMENT)
        .env_clear()
        .current_dir("/")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    *WITNESS.lock().unwrap_or_else(PoisonError::into_inner) = Some(ours);
    Ok(())
}

/// Asks the witness. Returns `None` if there is none, or it does not answer.
pub fn ask(question: Question) -> Option<String> {
    let mut witness = WITNESS.lock().unwrap_or_else(PoisonError::into_inner);
    let answer = asked(witness.as_mut()?, question);
    if let Err(e) = &answer {
        tracing::debug!("sandbox: the process that looks for holders of locks has failed: {e}");
        *witness = None;
    }
    answer.ok()
}

fn asked(witness: &mut UnixStream, question: Question) -> io::Result<String> {
    witness.write_all(&question.encode())?;
    let mut len = [0; 2];
    witness.read_exact(&mut len)?;
    let mut text = vec![0; u16::from_le_bytes(len).min(MAX_ANSWER).into()];
    witness.read_exact(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Answers questions on standard input until the server ends.
pub fn run(answer: impl Fn(Question) -> String) -> io::Result<()> {
    // As a file, because it needs fewer system calls than a socket.
    let mut socket = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    sandbox::confine_process(Kind::Witness)?;
    let mut bytes = [0; Question::BYTES];
    while socket.read_exact(&mut bytes).is_ok() {
        let text = answer(Question::decode(bytes));
        let text = &text.as_bytes()[..text.len().min(MAX_ANSWER.into())];
        socket.write_all(&(text.len() as u16).to_le_bytes())?;
        socket.write_all(text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_the_same_after_its_way() {
        let question = Question { kind: b'l', numbers: [u64::MAX - 1, 42] };
        assert_eq!(Question::decode(question.encode()), question);
    }
}
