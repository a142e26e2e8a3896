//! The thread that owns NVML.
//!
//! `Nvml` is a local of [`run`] and its handles are locals of [`serve`], so that the compiler sees to it that
//! no handle outlives the library, which has to be unloaded to notice a new driver or new GPUs. The thread that waits
//! for errors of GPUs borrows it as well. It needs up to a second to leave, and meanwhile processes are asked for.

use std::collections::VecDeque;
use std::time::Duration;

use nvml_wrapper::Nvml;
use tokio::sync::{mpsc, oneshot};

use crate::error::Error;
use crate::events::{Events, Waiter};
use crate::inventory::{self, Handle, Known};
use crate::session::Options;
use crate::snapshot::{GpuPair, GpuProcesses, Snapshot};
use crate::{library, processes, topology};

/// How often it is looked whether the thread that waits for errors has left, which takes a second at most.
const LEAVE_POLL: Duration = Duration::from_millis(10);

/// Where an answer goes.
pub(crate) type Answer<T> = oneshot::Sender<T>;

/// What the thread can be asked for.
#[derive(Debug)]
pub(crate) enum Request {
    /// [`crate::Session::snapshot`].
    Snapshot(Answer<Result<Snapshot, Error>>),
    /// [`crate::Session::rescan`].
    Rescan(Answer<Result<Snapshot, Error>>),
    /// [`crate::Session::processes`].
    Processes(Answer<Result<Vec<GpuProcesses>, Error>>),
    /// [`crate::Session::topology`].
    Topology(Answer<Result<Vec<GpuPair>, Error>>),
    /// [`crate::Session::shutdown`].
    Shutdown(Answer<()>),
}

impl Request {
    /// Whether the caller has given up; what nobody waits for is not asked of the driver.
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Snapshot(answer) | Self::Rescan(answer) => answer.is_closed(),
            Self::Processes(answer) => answer.is_closed(),
            Self::Topology(answer) => answer.is_closed(),
            // Stopping is wanted even if nobody waits for it.
            Self::Shutdown(_) => false,
        }
    }

    fn fail(self, error: Error) {
        match self {
            Self::Snapshot(answer) | Self::Rescan(answer) => send(answer, Err(error)),
            Self::Processes(answer) => send(answer, Err(error)),
            Self::Topology(answer) => send(answer, Err(error)),
            Self::Shutdown(answer) => send(answer, ()),
        }
    }
}

/// Why [`serve`] returned.
enum Next {
    /// The first of these wants NVML started anew; the others have come since.
    Reopen(VecDeque<Request>),
    /// NVML is not to be relied on; it is started anew at the next request.
    Closed,
    /// The thread ends, and tells so.
    Stop(Option<Answer<()>>),
}

/// Works until the last [`crate::Session`] is gone or one of them shuts it down.
pub(crate) fn run(mut queue: mpsc::Receiver<Request>, options: &Options, events: Option<&Events>) {
    let library = library::path(options.library.as_deref());
    let mut known = Known::new();
    let mut waiting = VecDeque::new();
    // With a lost GPU NVML is started anew at each scan, which is worth a line only after a failure.
    let mut announced = false;
    loop {
        let request = match waiting.pop_front().or_else(|| next(&mut queue)) {
            None => return,
            Some(Request::Shutdown(answer)) => {
                drop(queue);
                return send(answer, ());
            }
            Some(request) => request,
        };
        let nvml = match library::open(&library) {
            Ok(nvml) => nvml,
            Err(error) => {
                announced = false;
                request.fail(error);
                continue;
            }
        };
        if !std::mem::replace(&mut announced, true) {
            tracing::info!(library = %library.display(), "NVML is open");
        }
        waiting.push_front(request);
        let next = std::thread::scope(|scope| {
            let listen = |handles: &[Handle<'_>]| Waiter::start(scope, &nvml, handles, events?);
            let requests = (&mut waiting, &mut queue);
            serve(&nvml, listen, requests, options, &mut known)
        });
        library::close(nvml);
        match next {
            Next::Reopen(requests) => waiting.extend(requests),
            Next::Closed => {}
            Next::Stop(answer) => {
                drop(queue);
                if let Some(answer) = answer {
                    send(answer, ());
                }
                return;
            }
        }
    }
}

/// Answers requests with one run of NVML. The first ones were made before it was started.
fn serve<'scope>(
    nvml: &Nvml,
    listen: impl FnOnce(&[Handle<'_>]) -> Option<Waiter<'scope>>,
    (first, queue): (&mut VecDeque<Request>, &mut mpsc::Receiver<Request>),
    options: &Options,
    known: &mut Known,
) -> Next {
    let handles = match inventory::handles(nvml) {
        Ok(handles) => handles,
        Err(error) => {
            if let Some(first) = first.pop_front() {
                first.fail(Error::Node(error));
            }
            return Next::Closed;
        }
    };
    let waiter = listen(&handles);
    let mut uuids = processes::Uuids::new();
    let mut all_answered = true;
    let mut topology = Topology::default();
    loop {
        if waiter.as_ref().is_some_and(Waiter::has_left) {
            // It was not told to: the scope passes its panic on.
            return Next::Closed;
        }
        let (request, fresh) = match first.pop_front() {
            Some(request) => (request, true),
            None => match topology.meanwhile(nvml, &handles, queue) {
                Some(request) => (request, false),
                None => return Next::Stop(None),
            },
        };
        match request {
            Request::Rescan(_) | Request::Snapshot(_)
                if !fresh && (!all_answered || matches!(request, Request::Rescan(_))) =>
            {
                return reopen(request, waiter, queue, |answer| {
                    send(
                        answer,
                        Ok(processes::read(nvml, &handles, &mut uuids, known)),
                    );
                });
            }
            Request::Snapshot(answer) | Request::Rescan(answer) => {
                match inventory::read(nvml, &handles, &options.sys_root, known) {
                    Ok(snapshot) => {
                        all_answered = snapshot.failed.is_empty();
                        send(answer, Ok(snapshot));
                    }
                    Err(error) => {
                        send(answer, Err(Error::Node(error)));
                        return Next::Closed;
                    }
                }
            }
            Request::Processes(answer) => {
                let processes = processes::read(nvml, &handles, &mut uuids, known);
                let over = processes::nvml_is_over(&processes);
                send(answer, Ok(processes));
                if over {
                    return Next::Closed;
                }
            }
            Request::Topology(answer) => topology.begin(answer),
            Request::Shutdown(answer) => return Next::Stop(Some(answer)),
        }
    }
}

/// Lets the thread that waits for errors leave, so that NVML can be started anew. An `Allocate` waits for the processes,
/// and not as long as that takes; everything else is answered by the next run.
fn reopen(
    request: Request,
    waiter: Option<Waiter<'_>>,
    queue: &mut mpsc::Receiver<Request>,
    mut processes: impl FnMut(Answer<Result<Vec<GpuProcesses>, Error>>),
) -> Next {
    let mut requests = VecDeque::from([request]);
    let Some(waiter) = waiter else {
        return Next::Reopen(requests);
    };
    waiter.tell_to_leave();
    while !waiter.has_left() {
        match queue.try_recv() {
            Ok(request) if request.is_abandoned() => {}
            Ok(Request::Processes(answer)) => processes(answer),
            Ok(Request::Shutdown(answer)) => return Next::Stop(Some(answer)),
            Ok(request) => requests.push_back(request),
            Err(_) => std::thread::sleep(LEAVE_POLL),
        }
    }
    Next::Reopen(requests)
}

/// The reading of the topology that is under way in a run of NVML, and who waits for it.
#[derive(Default)]
struct Topology(Option<(topology::Reading, Pairs)>);

/// Where the pairs go.
type Pairs = Answer<Result<Vec<GpuPair>, Error>>;

impl Topology {
    /// Whoever waited for a reading before does so no longer.
    fn begin(&mut self, answer: Pairs) {
        self.interrupt();
        self.0 = Some((topology::Reading::default(), answer));
    }

    fn interrupt(&mut self) {
        if let Some((_, answer)) = self.0.take() {
            let what = "the topology";
            send(answer, Err(Error::Interrupted { what }));
        }
    }

    /// The next request that somebody waits for; until there is one the reading goes on.
    fn meanwhile(
        &mut self,
        nvml: &Nvml,
        handles: &[Handle<'_>],
        queue: &mut mpsc::Receiver<Request>,
    ) -> Option<Request> {
        while let Some((reading, answer)) = &mut self.0 {
            match queue.try_recv() {
                Ok(request) if request.is_abandoned() => {}
                Ok(request) => return Some(request),
                Err(mpsc::error::TryRecvError::Disconnected) => return None,
                Err(mpsc::error::TryRecvError::Empty) if answer.is_closed() => self.0 = None,
                Err(mpsc::error::TryRecvError::Empty) => {
                    if let Some(pairs) = reading.step(nvml, handles)
                        && let Some((_, answer)) = self.0.take()
                    {
                        send(answer, Ok(pairs));
                    }
                }
            }
        }
        next(queue)
    }
}

impl Drop for Topology {
    fn drop(&mut self) {
        self.interrupt();
    }
}

/// The next request that somebody waits for.
fn next(queue: &mut mpsc::Receiver<Request>) -> Option<Request> {
    loop {
        let request = queue.blocking_recv()?;
        if !request.is_abandoned() {
            return Some(request);
        }
    }
}

fn send<T>(answer: Answer<T>, value: T) {
    // A caller that has given up since needs no answer.
    let _ = answer.send(value);
}
