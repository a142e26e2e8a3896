//! An arbiter that only listens: what would become of a pool is seen, and nothing is saved, shown or given out.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use bridge_core::{Moment, Pool, Report, Status};
use tokio::sync::{mpsc, watch};

use super::handle::{Call, Error, Handle};
use super::task::{ProcessProbe, observe};

/// Observations that may wait: there is one task for each source.
const QUEUE_LIMIT: usize = 32;

/// Takes what is observed into a pool that is in memory alone, and refuses every other call.
pub struct Rehearsal {
    pool: Pool,
    probe: ProcessProbe,
    calls: mpsc::Receiver<Call>,
    status: watch::Sender<Arc<Status>>,
    reports: Arc<Mutex<Vec<Report>>>,
    started: Instant,
}

impl fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rehearsal").finish_non_exhaustive()
    }
}

impl Rehearsal {
    /// With this pool at the start.
    #[must_use]
    pub fn new(pool: Pool, probe: ProcessProbe) -> (Self, Handle) {
        let started = Instant::now();
        let (sender, calls) = mpsc::channel(QUEUE_LIMIT);
        let (_, offers) = watch::channel(Arc::new(pool.offers()));
        let (status, seen) = watch::channel(Arc::new(pool.status(SystemTime::now())));
        let rehearsal = Self {
            pool,
            probe,
            calls,
            status,
            reports: Arc::default(),
            started,
        };
        (rehearsal, Handle::new(sender, offers, seen, started))
    }

    /// What the observations have led to, read whenever somebody likes.
    pub fn reports(&self) -> impl Fn() -> Vec<Report> + use<> {
        let reports = Arc::clone(&self.reports);
        move || {
            let reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
            reports.clone()
        }
    }

    /// Listens until every [`Handle`] is gone.
    pub async fn run(mut self) {
        while let Some(call) = self.calls.recv().await {
            // Whoever asked may be gone.
            match call {
                Call::Observe { observation, reply } => {
                    let moment = Moment {
                        wall: SystemTime::now(),
                        uptime: self.started.elapsed(),
                    };
                    let mut transition = self.pool.begin(moment, (self.probe)().await);
                    observe(&mut transition, observation);
                    let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
                    reports.extend(self.pool.commit(transition));
                    drop(reports);
                    let status = self.pool.status(moment.wall);
                    self.status.send_replace(Arc::new(status));
                    drop(reply.send(Ok(())));
                }
                Call::Allocate { reply, .. } => drop(reply.send(Err(Error::Stopping))),
                Call::Prepare { reply, .. } => drop(reply.send(Err(Error::Stopping))),
                Call::Unprepare { reply, .. } => drop(reply.send(Err(Error::Stopping))),
                Call::Release { reply, .. } => drop(reply.send(Err(Error::Stopping))),
                Call::ClearFault { reply, .. } => drop(reply.send(Err(Error::Stopping))),
                Call::HandOver { reply, .. } => drop(reply.send(Err(Error::Stopping))),
                Call::TakeBack { reply } => drop(reply.send(Err(Error::Stopping))),
            }
        }
    }
}
