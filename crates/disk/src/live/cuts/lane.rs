//! One client of the disk: it has one request in flight, and checks each answer.

use std::cell::RefCell;
use std::rc::Rc;

use blockyard_ring::{Handle, Segments};
use blockyard_storage::sim::{Rng, SECTOR, pattern};

use super::stage::Stage;
use crate::local_disk::LocalDisk;
use crate::{Op, Request, Status, Token};

/// Sectors of a stripe. Lanes share clusters, but not sectors. So each lane knows the contents of
/// its own sectors.
const STRIPE: u64 = 12;

pub struct Lane {
    pub stage: Rc<Stage>,
    pub handle: Handle,
    pub served: Rc<LocalDisk>,
    pub number: u64,
    pub lanes: u64,
    pub rng: Rng,
}

type Answered = (Status, Vec<u8>);

struct Answer(Rc<RefCell<Option<Answered>>>);

impl Token for Answer {
    fn answer(self, status: Status, segments: Segments) {
        let mut bytes = vec![0; segments.len()];
        segments.copy_out(0, &mut bytes);
        let first = self.0.borrow_mut().replace((status, bytes)).is_none();
        assert!(first, "a request was answered twice");
    }

    fn may_wait(&self) -> bool {
        true
    }
}

impl Lane {
    /// Makes requests until the stage ends.
    pub async fn run(mut self) {
        while self.stage.goes_on() {
            if let Err(error) = self.step().await {
                self.stage.fail(format!("lane {}: {error}", self.number));
            }
            for _ in 0..self.rng.below(12) {
                self.handle.yield_now().await;
            }
        }
    }

    async fn ask(&self, op: Op, at: u64, segments: Segments, len: u64) -> Answered {
        let answer = Rc::new(RefCell::default());
        let request =
            Request::new(op, at, len, segments, self.handle.now(), Answer(answer.clone()));
        self.served.serve(request).await.answer();
        answer.take().expect("a request that was served is answered")
    }

    /// Returns a random range of the lane's own sectors, in bytes.
    fn range(&mut self) -> (u64, u64) {
        let (sector, stripe) = (SECTOR as u64, STRIPE * SECTOR as u64);
        let own = self.stage.size / stripe / self.lanes;
        let first = (self.rng.below(own) * self.lanes + self.number) * stripe;
        let begin = self.rng.below(STRIPE);
        let most = if self.rng.one_in(3) { STRIPE } else { 4 };
        let count = self.rng.between(1, most).min(STRIPE - begin);
        (first + begin * sector, count * sector)
    }

    async fn step(&mut self) -> Result<(), String> {
        let ((at, len), kind) = (self.range(), self.rng.below(10));
        match kind {
            0..2 => self.flush().await,
            2..4 => self.read(at, len).await,
            4 => {
                let (unmap, fua) = (self.rng.one_in(2), self.rng.one_in(4));
                self.change(Op::WriteZeroes { unmap, fua, fast: false }, at, vec![0; len as usize])
                    .await
            }
            _ => {
                let fua = self.rng.one_in(6);
                let data = pattern(self.rng.next_u64(), at, len as usize);
                self.change(Op::Write { fua }, at, data).await
            }
        }
    }

    async fn change(&self, op: Op, at: u64, data: Vec<u8>) -> Result<(), String> {
        let (is_write, durable) = match op {
            Op::Write { fua } => (true, fua),
            Op::WriteZeroes { fua, .. } => (false, fua),
            _ => (false, false),
        };
        let token = self.stage.oracle.borrow_mut().write_started(at, &data);
        let segments = if is_write { Segments::from_bytes(&data) } else { Segments::default() };
        let (status, _) = self.ask(op, at, segments, data.len() as u64).await;
        if self.stage.is_off() {
            return Ok(());
        }
        status.map_err(|failure| format!("{op:?} at {at}: {failure:?}"))?;
        self.stage.oracle.borrow_mut().write_answered(token, true, durable);
        self.stage.model.borrow_mut()[at as usize..][..data.len()].copy_from_slice(&data);
        self.stage.note(|tally| tally.writes += 1);
        Ok(())
    }

    pub async fn flush(&self) -> Result<(), String> {
        let token = self.stage.oracle.borrow_mut().flush_started();
        let (status, _) = self.ask(Op::Flush, 0, Segments::default(), 0).await;
        if self.stage.is_off() {
            return Ok(());
        }
        status.map_err(|failure| format!("a flush: {failure:?}"))?;
        self.stage.oracle.borrow_mut().flush_answered(token, true);
        self.stage.note(|tally| tally.flushes += 1);
        Ok(())
    }

    async fn read(&self, at: u64, len: u64) -> Result<(), String> {
        let (status, bytes) = self.ask(Op::Read, at, Segments::buffer(len as usize), len).await;
        if self.stage.is_off() {
            return Ok(());
        }
        status.map_err(|failure| format!("a read at {at}: {failure:?}"))?;
        let model = self.stage.model.borrow();
        match bytes == model[at as usize..][..len as usize] {
            true => Ok(()),
            false => Err(format!("a read at {at}+{len} does not return what was written")),
        }
    }
}
