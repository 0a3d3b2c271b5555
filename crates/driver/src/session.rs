//! Creates a session: from a socket's path to running queues, and again after the back end has
//! crashed.
//!
//! In: a `Plan`. Out: a `Link` (connection, memory, the in-flight buffer), and the queues, which
//! the caller may move to other threads.
//!
//! What must hold: memory and rings live as long as the link, across connections. The link requests
//! the in-flight buffer once, and sends it to every later back end, as QEMU does.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result, ensure};
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::connection::{BlockConfig, Connection, Inflight, PROTOCOL, RingSetup};
use super::ring::{Ring, RingOptions};
use super::{Memory, Queue, feature};

/// The features to negotiate, and the queues to set up.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub queues: u16,
    pub queue_size: u16,
    /// Maximum number of requests in flight per queue.
    pub slots: u16,
    /// Size of the data buffer of a request, in bytes.
    pub data_len: u32,
    pub event_idx: bool,
    pub indirect: bool,
    /// Features that the session accepts if they are offered, and features without which it fails.
    pub wanted: u64,
    pub required: u64,
    pub protocol: VhostUserProtocolFeatures,
    /// Longest time until the back end accepts the connection, and longest time for each exchange
    /// of messages.
    pub answer_limit: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            queues: 1,
            queue_size: 128,
            slots: 32,
            data_len: 4096,
            event_idx: true,
            indirect: false,
            wanted: feature::GUEST,
            required: 0,
            protocol: PROTOCOL,
            answer_limit: Duration::from_secs(60),
        }
    }
}

impl Plan {
    fn wanted(&self) -> u64 {
        let event_idx = if self.event_idx { 0 } else { feature::EVENT_IDX };
        self.wanted & !event_idx
    }

    fn required(&self) -> u64 {
        self.required | if self.indirect { feature::INDIRECT_DESC } else { 0 }
    }
}

/// A connection to a back end that maps the driver's memory.
pub struct Link {
    path: PathBuf,
    plan: Plan,
    /// Features of the ring's layout.
    layout: u64,
    pub connection: Connection,
    pub memory: Memory,
    pub inflight: Option<Inflight>,
    pub config: BlockConfig,
}

impl Link {
    /// Connects to a back end for rings of the layout `R`. The caller must then create and start
    /// the queues.
    pub fn open<R: Ring>(path: &Path, plan: &Plan) -> Result<Self> {
        let options = RingOptions {
            size: plan.queue_size,
            slots: plan.slots,
            event_idx: true,
            indirect: plan.indirect,
        };
        options.check()?;
        let memory = Memory::new(
            u64::from(plan.queues) * Queue::<R>::memory_needed(options, plan.data_len),
        )?;
        let mut connection = Connection::open_within(path, plan.answer_limit)?;
        let (config, inflight) = connection.within(plan.answer_limit, |c| {
            let config = Self::agree(c, plan, R::FEATURES)?;
            let inflight = c.inflight(plan.queues, plan.queue_size)?;
            Ok((config, inflight))
        })?;
        Ok(Link {
            path: path.into(),
            plan: *plan,
            layout: R::FEATURES,
            connection,
            memory,
            inflight,
            config,
        })
    }

    fn agree(connection: &mut Connection, plan: &Plan, layout: u64) -> Result<BlockConfig> {
        connection.negotiate(plan.wanted() | layout, plan.required() | layout, plan.protocol)?;
        let config = if connection.protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            connection.config()?
        } else {
            BlockConfig::default()
        };
        let queues = connection.queues_max.min(u64::from(config.num_queues.max(1)));
        ensure!(
            u64::from(plan.queues) <= queues,
            NotOffered,
            "the back end has {queues} queues, not {}",
            plan.queues
        );
        Ok(config)
    }

    /// Creates the queues of the plan. The back end does not know them yet.
    pub fn queues<R: Ring>(&mut self) -> Result<Vec<Queue<R>>> {
        let plan = self.plan;
        let event_idx = self.connection.features & feature::EVENT_IDX != 0;
        let options = RingOptions {
            size: plan.queue_size,
            slots: plan.slots,
            event_idx,
            indirect: plan.indirect,
        };
        (0..plan.queues)
            .map(|index| Queue::new(&mut self.memory, index, options, plan.data_len))
            .collect()
    }

    /// Sends memory and rings to the back end, and starts the rings.
    pub fn start(&mut self, rings: &[(RingSetup, u32)]) -> Result<()> {
        let Link { connection, memory, inflight, plan, .. } = self;
        connection.within(plan.answer_limit, |c| {
            if let Some(inflight) = inflight {
                c.set_inflight(inflight)?;
            }
            c.set_memory(memory)?;
            for (ring, base) in rings {
                c.set_ring(ring, *base, memory)?;
            }
            rings.iter().try_for_each(|(ring, _)| c.enable(ring.index, true))
        })
    }

    /// Connects to the same path again, and negotiates the same features. The caller must then
    /// start the rings.
    pub fn reopen(&mut self) -> Result<()> {
        let mut connection = Connection::open_within(&self.path, self.plan.answer_limit)?;
        let (plan, layout) = (self.plan, self.layout);
        let config = connection.within(plan.answer_limit, |c| Self::agree(c, &plan, layout))?;
        ensure!(
            connection.features == self.connection.features,
            NotOffered,
            "the new back end offers other features: {:#x} instead of {:#x}",
            connection.features,
            self.connection.features
        );
        (self.connection, self.config) = (connection, config);
        Ok(())
    }

    /// Stops the queues, as a guest that shuts down does.
    pub fn stop(&mut self) -> Result<()> {
        let Plan { queues, answer_limit, .. } = self.plan;
        self.connection
            .within(answer_limit, |c| (0..queues).try_for_each(|q| c.stop_ring(q).map(|_| ())))
    }
}

/// A link and its queues on one thread, for tests.
pub struct Session<R> {
    pub link: Link,
    pub queues: Vec<Queue<R>>,
}

impl<R: Ring> Session<R> {
    /// Connects, creates the queues of the plan, and starts them.
    pub fn start(path: &Path, plan: &Plan) -> Result<Self> {
        let mut link = Link::open::<R>(path, plan)?;
        let queues = link.queues::<R>()?;
        let rings: Vec<_> = queues.iter().map(|q| (q.setup(), q.ring.fresh_base())).collect();
        link.start(&rings).context(format!("cannot start the queues at {}", path.display()))?;
        Ok(Session { link, queues })
    }

    /// Connects again after the back end has ended. With an in-flight buffer, the rings stay
    /// unchanged. Without one, the rings are emptied, and everything in flight is submitted again.
    /// In both cases, kicks the queues at the end.
    pub fn restart(&mut self) -> Result<()> {
        self.link.reopen()?;
        let known = self.link.inflight.is_some();
        let rings: Vec<_> =
            self.queues.iter_mut().map(|q| (q.setup(), q.resume_base(known))).collect();
        self.link.start(&rings)?;
        for queue in &mut self.queues {
            queue.publish()?;
            queue.kick()?;
        }
        Ok(())
    }
}
