//! Lines: a toy protocol of text, one request a line.
//!
//! In: `READ sector`, `WRITE sector hex`, `FLUSH`. Out: `OK`, `OK hex` or `ERR failure`, in the
//! order of the requests. What must hold: a client has one request and one line in memory.

use std::io;

use blockyard_disk::Op;
use blockyard_ring::Segments;

use crate::connections::{Connection, Protocol};

const SECTOR: usize = blockyard_image::SECTOR as usize;
/// Longest line in bytes.
const LINE: usize = 2 * SECTOR + 64;

pub struct Lines;

impl Protocol for Lines {
    const KIND: &'static str = "lines";

    async fn serve(connection: &Connection) -> io::Result<()> {
        let mut received = Vec::new();
        loop {
            while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
                let line = received.drain(..=end).collect::<Vec<_>>();
                connection.send(answer(connection, &line).await.as_bytes()).await?;
            }
            if received.len() > LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "its line is too long"));
            }
            match connection.receive(LINE).await? {
                bytes if bytes.is_empty() => return Ok(()),
                bytes => received.extend(bytes),
            }
        }
    }
}

async fn answer(connection: &Connection, line: &[u8]) -> String {
    let Some((op, place, data)) = parse(line) else { return "ERR Malformed\n".into() };
    match connection.serve(op, place, data).await {
        Ok(data) if op == Op::Read => {
            let mut bytes = [0; SECTOR];
            data.copy_out(0, &mut bytes);
            format!("OK {}\n", bytes.map(|byte| format!("{byte:02x}")).concat())
        }
        Ok(_) => "OK\n".into(),
        Err(failure) => format!("ERR {failure:?}\n"),
    }
}

fn parse(line: &[u8]) -> Option<(Op, (u64, u64), Segments)> {
    let words = str::from_utf8(line).ok()?.split_whitespace().collect::<Vec<_>>();
    let place = |sector: &str| {
        Some((sector.parse::<u64>().ok()?.checked_mul(SECTOR as u64)?, SECTOR as u64))
    };
    match words[..] {
        ["READ", sector] => Some((Op::Read, place(sector)?, Segments::buffer(SECTOR))),
        ["WRITE", sector, hex] if hex.len() == 2 * SECTOR => {
            let byte = |at| u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok();
            let data = (0..SECTOR).map(byte).collect::<Option<Vec<_>>>()?;
            Some((Op::Write { fua: false }, place(sector)?, Segments::from_bytes(&data)))
        }
        ["FLUSH"] => Some((Op::Flush, (0, 0), Segments::default())),
        _ => None,
    }
}
