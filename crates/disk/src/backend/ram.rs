//! A disk in memory.
//!
//! What must hold: it copies data on its reactor. So it does a large request in pieces, and the
//! reactor's other tasks run between them.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockyard_ring::{GuestMemory, Handle, Segments};

/// Number of bytes that are copied or zeroed before the reactor's other tasks run.
const RAM_PIECE: usize = 1 << 20;

/// A disk in memory, shared by all reactors; lost with the process.
pub struct Ram {
    handle: Handle,
    memory: Rc<GuestMemory>,
}

impl Ram {
    pub fn new(handle: &Handle, memory: &Arc<GuestMemory>) -> Self {
        Ram { handle: handle.clone(), memory: Rc::new((**memory).clone()) }
    }

    /// Calls `f` with each piece of the range, and the piece's offset within the range.
    pub async fn in_pieces(
        &self,
        offset: u64,
        len: usize,
        mut f: impl FnMut(&Segments, usize),
    ) -> io::Result<()> {
        let mut at = 0;
        loop {
            let here = (len - at).min(RAM_PIECE);
            self.with(offset + at as u64, here, |ram| f(ram, at))?;
            at += here;
            if at == len {
                return Ok(());
            }
            self.handle.yield_now().await;
        }
    }

    /// Zeroes a range in pieces. Offset and length are in bytes.
    pub async fn zero(&self, offset: u64, len: usize) -> io::Result<()> {
        self.in_pieces(offset, len, |ram, _| ram.zero(0, ram.len())).await
    }

    fn with(&self, offset: u64, len: usize, f: impl FnOnce(&Segments)) -> io::Result<()> {
        let mut segments = Segments::default();
        segments.reset(&self.memory);
        segments.push_guest(offset, len as u64).map_err(io::Error::other)?;
        f(&segments);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use blockyard_ring::{Executor, Region};

    use super::*;

    const PIECES: u64 = 6;

    /// Returns how often another task runs during a request of many pieces.
    fn runs_meanwhile(work: impl AsyncFnOnce(&Ram, &Segments) + 'static) -> u64 {
        let len = PIECES as usize * RAM_PIECE;
        let memory =
            GuestMemory::default().with(Region::memfd("ram", 0, 0, len as u64).unwrap().0).unwrap();
        let executor = Executor::new().unwrap();
        let handle = executor.handle().clone();
        let runs = executor.block_on(async move {
            let ram = Ram::new(&handle, &Arc::new(memory));
            let (runs, done) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
            let (count, ended, tasks) = (runs.clone(), done.clone(), handle.clone());
            handle.spawn(async move {
                while !ended.get() {
                    count.set(count.get() + 1);
                    tasks.yield_now().await;
                }
            });
            work(&ram, &Segments::buffer(len)).await;
            done.set(true);
            runs.get()
        });
        runs.unwrap()
    }

    #[test]
    fn other_tasks_run_during_a_large_request() {
        let len = PIECES as usize * RAM_PIECE;
        let copied = runs_meanwhile(async move |ram, segments| {
            segments.copy_in(len - 1, &[7]);
            ram.in_pieces(0, len, |ram, at| ram.copy_from(0, segments, at, ram.len()))
                .await
                .unwrap();
            segments.zero(0, len);
            ram.in_pieces(0, len, |ram, at| segments.copy_from(at, ram, 0, ram.len()))
                .await
                .unwrap();
            assert_eq!(segments.find_nonzero(0, len), Some(len - 1));
        });
        assert!(copied >= 2 * (PIECES - 1), "{copied} runs");
        let zeroed = runs_meanwhile(async move |ram, _| ram.zero(0, len).await.unwrap());
        assert!(zeroed >= PIECES - 1, "{zeroed} runs");
    }
}
