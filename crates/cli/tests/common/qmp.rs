//! QEMU's monitor (QMP), in JSON.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use super::TOOL;

pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// Events that no call has consumed yet.
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to the QMP socket of a running QEMU.
    #[track_caller]
    pub fn connect(path: &Path) -> Self {
        let stream =
            UnixStream::connect(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        stream.set_read_timeout(Some(TOOL)).unwrap();
        let mut qmp = Qmp { stream: BufReader::new(stream), events: VecDeque::new() };
        let greeting = qmp.message();
        assert!(greeting.get("QMP").is_some(), "{greeting}");
        qmp.execute("qmp_capabilities", json!({}));
        qmp
    }

    /// Runs a command, which must succeed. Returns its result.
    #[track_caller]
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        writeln!(self.stream.get_mut(), "{text}").unwrap();
        loop {
            let mut message = self.message();
            assert!(message.get("error").is_none(), "{text}: {message}");
            match message.get_mut("return") {
                Some(answer) => return answer.take(),
                None => self.events.push_back(message),
            }
        }
    }

    /// Waits for an event with one of `names`. Returns its name.
    #[track_caller]
    pub fn event(&mut self, names: &[&'static str]) -> &'static str {
        loop {
            let message = self.events.pop_front().unwrap_or_else(|| self.message());
            if let Some(name) = names.iter().find(|n| message["event"] == **n) {
                return name;
            }
        }
    }

    #[track_caller]
    fn message(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("QEMU's monitor answers");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }
}
