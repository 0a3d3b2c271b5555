//! What the tests have in common: files, and a guest without a virtual machine.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockyard_driver::{Data, Plan, Session, SplitRing, request, status};

/// A folder that is removed at the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("blockyard-own-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.path(name).to_str().unwrap().into()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A guest on a vhost-user socket.
pub struct Guest(Session<SplitRing>);

/// Largest request of a guest in bytes.
const PIECE: usize = 64 << 10;
/// Limit for hangs only.
const LIMIT: Duration = Duration::from_secs(60);

impl Guest {
    pub fn connect(socket: &Path) -> Self {
        let plan = Plan { data_len: PIECE as u32, answer_limit: LIMIT, ..Plan::default() };
        Guest(Session::start(socket, &plan).unwrap())
    }

    fn call(&mut self, kind: u32, offset: usize, data: Data, bytes: &mut [u8]) -> u8 {
        self.0.queues[0].call(kind, offset as u64 / 512, data, bytes, LIMIT).unwrap()
    }

    /// Reads, or returns the status of the first request that fails.
    pub fn try_read(&mut self, offset: usize, len: usize) -> Result<Vec<u8>, u8> {
        let mut bytes = vec![0; len];
        for (number, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let (at, data) = (offset + number * PIECE, Data::FromDevice(piece.len() as u32));
            match self.call(request::IN, at, data, piece) {
                status::OK => {}
                failed => return Err(failed),
            }
        }
        Ok(bytes)
    }

    pub fn try_write(&mut self, offset: usize, bytes: &[u8]) -> u8 {
        let mut bytes = bytes.to_vec();
        for (number, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let (at, data) = (offset + number * PIECE, Data::ToDevice(piece.len() as u32));
            match self.call(request::OUT, at, data, piece) {
                status::OK => {}
                failed => return failed,
            }
        }
        status::OK
    }

    pub fn try_flush(&mut self) -> u8 {
        self.call(request::FLUSH, 0, Data::None, &mut [])
    }

    pub fn read(&mut self, offset: usize, len: usize) -> Vec<u8> {
        self.try_read(offset, len).unwrap()
    }

    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert_eq!(self.try_write(offset, bytes), status::OK);
    }

    pub fn flush(&mut self) {
        assert_eq!(self.try_flush(), status::OK);
    }
}
