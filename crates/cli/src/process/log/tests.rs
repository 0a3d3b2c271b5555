use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::process::awaited::{HANG, next};

/// A stream on which each write waits for the test, which supplies the result.
struct ScriptedStream {
    answers: Receiver<Result<(), i32>>,
    seen: Sender<String>,
}

impl Write for ScriptedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.seen
            .send(String::from_utf8_lossy(bytes).into_owned())
            .map_err(|_| io::ErrorKind::BrokenPipe)?;
        match self.answers.recv() {
            Ok(Ok(())) => Ok(bytes.len()),
            Ok(Err(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const ENOSPC: i32 = 28;

fn queue() -> (&'static Queue, Sender<Result<(), i32>>, Receiver<String>) {
    let queue: &'static Queue = Box::leak(Box::new(Queue::new("the test")));
    let ((answer, answers), (seen, written)) = (channel(), channel());
    queue.spawn("test", ScriptedStream { answers, seen }).unwrap();
    (queue, answer, written)
}

#[test]
fn a_message_hides_nothing() {
    let shown = |text: &str| String::from_utf8(visible(text.as_bytes()).into_owned()).unwrap();
    assert_eq!(shown("disk \u{202e}a\u{2069} \u{1b}[32mok\n"), "disk ?a? \u{1b}[32mok\n");
    assert!(matches!(visible("caf\u{e9}\n".as_bytes()), Cow::Borrowed(_)));
}

#[test]
fn a_blocked_stream_blocks_no_caller_and_dropped_messages_are_counted() {
    let (queue, answer, written) = queue();
    queue.push(b"first\n");
    assert_eq!(next(&written), "first\n");
    // The thread now blocks in a write. All of these calls return.
    let message = [&[b'x'; 1023][..], b"\n"].concat();
    for _ in 0..QUEUED / message.len() + 7 {
        queue.push(&message);
    }
    assert!(!queue.flush(Duration::ZERO), "a flush with a timeout of 0 returns");
    answer.send(Ok(())).unwrap();
    assert_eq!(
        next(&written),
        "blockyard: 7 messages dropped, because of the test: its reader is too slow\n"
    );
    answer.send(Ok(())).unwrap();
    assert_eq!(next(&written).len(), QUEUED);
    answer.send(Ok(())).unwrap();
    assert!(queue.flush(HANG));
    queue.push(b"last\n");
    assert_eq!(next(&written), "last\n");
}

#[test]
fn messages_that_fail_to_be_written_are_reported_after_the_next_success() {
    let (queue, answer, written) = queue();
    for line in ["one\n", "two\n"] {
        queue.push(line.as_bytes());
        assert_eq!(next(&written), line);
        answer.send(Err(ENOSPC)).unwrap();
        assert!(queue.flush(HANG), "a failed write ends the wait of a flush");
    }
    queue.push(b"three\n");
    assert_eq!(next(&written), "three\n");
    answer.send(Ok(())).unwrap();
    let report = "blockyard: 2 messages dropped, because of the test: No space left on device \
                  (os error 28)\n";
    assert_eq!(next(&written), report);
    // The write of the report fails too: a later write repeats it.
    answer.send(Err(ENOSPC)).unwrap();
    queue.push(b"four\n");
    assert_eq!(next(&written), "four\n");
    answer.send(Ok(())).unwrap();
    assert_eq!(next(&written), report);
}

#[test]
fn a_partly_written_line_is_ended_before_the_next_one() {
    struct Cut(Sender<String>, u32);
    impl Write for Cut {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1 += 1;
            match self.1 {
                1 => Ok(3),
                2 => Err(io::Error::from_raw_os_error(ENOSPC)),
                _ => {
                    self.0.send(String::from_utf8_lossy(bytes).into_owned()).unwrap();
                    Ok(bytes.len())
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let queue: &'static Queue = Box::leak(Box::new(Queue::new("the test")));
    let (seen, written) = channel();
    queue.spawn("test", Cut(seen, 0)).unwrap();
    queue.push(b"a long line\n");
    assert!(queue.flush(HANG));
    queue.push(b"the next\n");
    assert_eq!(next(&written), "\nthe next\n");
    assert!(next(&written).starts_with("blockyard: 1 message dropped"));
}
