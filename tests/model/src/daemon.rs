//! The daemon: the real pool, the ledger's file, and how far a batch of calls has come between them.

use std::time::Duration;

use bridge_core::{
    Health, Ledger, Moves, Pool, Settings, Side, Sight, Standing, UnitKind, UnitRecord,
};

use crate::broken::Broken;
use crate::decided::Game;
use crate::keyed::Keyed;
use crate::names::{claim_uid, number_of, unit};
use crate::properties::Breach;
use crate::scope::{Scope, Sides};
use crate::set::Set;
use crate::shown;

/// What the arbiter is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// `Allocate` for a counted pod.
    Allocate {
        /// The pod.
        pod: usize,
        /// The ids that the kubelet has picked.
        ids: Set,
    },
    /// `NodePrepareResources` for the claim of a pod.
    Prepare {
        /// The pod.
        pod: usize,
    },
    /// The same when its time is up, and it was told to wait.
    PrepareAtLast {
        /// The pod.
        pod: usize,
    },
    /// `NodeUnprepareResources`.
    Unprepare {
        /// The claim.
        claim: usize,
    },
    /// Something was seen.
    Look(Look),
}

/// What the daemon looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Look {
    /// pod-resources.
    Listing,
    /// The pods bound here.
    Pods,
    /// The claims allocated here.
    Claims,
    /// The processes on the GPUs.
    Processes,
    /// The GPUs.
    Inventory,
    /// The count in the own Node.
    Node,
    /// All of it, for want of a ledger.
    Adoption,
    /// The clock.
    Time,
}

/// What a caller hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Granted {
        pod: usize,
        ids: Set,
        units: Set,
        /// Those of the units on which a process of a former counted pod still runs, as reported.
        over: Set,
    },
    Refused {
        pod: usize,
    },
    Prepared {
        pod: usize,
        unit: usize,
    },
    /// Prepare has to wait, or is refused: the kubelet comes again.
    NotNow {
        pod: usize,
    },
    Unprepared {
        claim: usize,
    },
    Seen,
}

/// What is offered to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Offered {
    /// What the Node should say.
    pub(crate) count: u32,
    /// Healthy ids.
    pub(crate) healthy: Set,
    /// Devices without a taint.
    pub(crate) untainted: Set,
}

/// The pool at some time, and what follows from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Memory {
    pub(crate) pool: Keyed<Pool>,
    pub(crate) uptime: Duration,
    pub(crate) ledger: Keyed<Ledger>,
    pub(crate) offered: Offered,
}

impl Memory {
    pub(crate) fn new(pool: Keyed<Pool>, uptime: Duration) -> Self {
        let offers = pool.offers();
        let healthy = offers.counted.iter();
        let healthy = healthy.filter(|offer| offer.health == Health::Healthy);
        let untainted = offers.claims.iter().flatten();
        let untainted = untainted.filter(|offer| offer.taint.is_none());
        Self {
            ledger: Keyed::new(pool.ledger().clone()),
            uptime,
            offered: Offered {
                count: offers.count,
                healthy: healthy
                    .map(|offer| number_of(offer.id.named_unit()))
                    .collect(),
                untainted: untainted.map(|offer| number_of(&offer.gpu.uuid)).collect(),
            },
            pool,
        }
    }
}

/// A transition that was planned: what is saved, committed and answered.
#[derive(Debug, Hash)]
pub(crate) struct Plan {
    /// Memory as it is after the commit.
    pub(crate) after: Memory,
    /// Whether there is anything to be saved.
    pub(crate) saves: bool,
    pub(crate) calls: Vec<Call>,
    pub(crate) answers: Vec<Answer>,
}

/// How far a batch has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Progress {
    Planned,
    Saved,
    Committed,
    /// The CDI files are as the ledger says; the answers are next.
    Written,
}

/// What the arbiter is at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Doing {
    Idle,
    Batch(Progress, Keyed<Plan>),
}

/// A daemon that runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Up {
    pub(crate) memory: Memory,
    pub(crate) doing: Doing,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Daemon {
    Down,
    Up(Up),
}

/// The ledger's file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Disk {
    /// What the pool in memory has.
    AsInMemory,
    Is(Keyed<Ledger>),
    /// There is none.
    Missing,
}

/// Time passes in whole seconds, and else in moments.
pub(crate) fn sight(scope: &Scope) -> Sight {
    Sight {
        grain: Duration::from_secs(1),
        moves: match scope.sides {
            Sides::Fixed => Moves::Never,
            Sides::Move => Moves::Happen,
        },
    }
}

/// The ledger of a node on which nothing has happened yet.
pub(crate) fn first_ledger(scope: &Scope) -> Ledger {
    let mut ledger = Ledger::default();
    for number in scope.units().iter() {
        let parent = scope.parents[number].filter(|_| scope.broken != Some(Broken::ForgetsOverlap));
        let record = UnitRecord {
            number: u32::try_from(number).unwrap_or(u32::MAX),
            kind: match parent {
                None => UnitKind::Gpu,
                Some(parent) => UnitKind::Mig {
                    parent: unit(parent),
                },
            },
            capacity: std::num::NonZeroU32::MIN,
            side: match scope.sides {
                Sides::Fixed => Side::Legacy,
                Sides::Move => Side::Rest,
            },
            gpu: shown::gpu(number).into(),
        };
        ledger.units.insert(unit(number), record);
    }
    ledger
}

impl Up {
    /// A daemon that has read its ledger and not looked at anything yet.
    pub(crate) fn start(scope: &Game, ledger: Option<&Ledger>) -> Result<Self, Breach> {
        let pool = match ledger {
            Some(ledger) => Pool::restored(ledger.clone(), Settings::default()),
            None => Pool::waiting(Settings::default()),
        };
        Ok(Self {
            memory: scope.remember(pool, Duration::ZERO)?,
            doing: Doing::Idle,
        })
    }

    pub(crate) fn serves(&self) -> bool {
        self.memory.pool.standing() == Standing::Serving
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.doing == Doing::Idle
    }

    /// Claims that the ledger has as prepared.
    pub(crate) fn prepared(&self, scope: &Scope) -> Set {
        let prepared = &self.memory.ledger.prepared;
        let is_prepared = |claim: &usize| prepared.contains_key(&claim_uid(*claim));
        scope.claims().filter(is_prepared).collect()
    }
}
