//! The loads that have a name: which pods come when, and how long they live.

use std::time::Duration;

use super::dice::Dice;

/// What a pod asks for its GPUs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `nvidia.com/gpu: N`.
    Counted,
    /// A claim made from a template.
    Claim,
}

impl Kind {
    /// In the order in which tables name them.
    pub const BOTH: [Self; 2] = [Self::Counted, Self::Claim];

    /// As pods are called.
    pub fn word(self) -> &'static str {
        match self {
            Self::Counted => "counted",
            Self::Claim => "claim",
        }
    }
}

/// When pods come.
#[derive(Clone, Copy, Debug)]
pub enum Arrivals {
    /// The next one comes when too few of its kind wait: none, one or two, thrown anew every two seconds.
    Waiting,
    /// On average one in this time, either kind, whatever waits.
    Stream(Duration),
    /// So many of each kind at once, each time that this has passed.
    Bursts {
        each: u32,
        every: Duration,
        made: Made,
    },
    /// So many of each kind at once, made by controllers, when all of the round before are gone and this pause is over.
    Rounds {
        each: u32,
        pause: (Duration, Duration),
    },
}

impl Arrivals {
    /// Who makes the pods that come at the same time.
    pub fn made(self) -> Made {
        match self {
            Self::Bursts { made, .. } => made,
            Self::Waiting | Self::Stream(_) | Self::Rounds { .. } => Made::ByControllers,
        }
    }
}

/// Who makes the pods that come at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// One client, each when the one before is there, in a thrown order: `kubectl apply` of a file.
    OneByOne,
    /// Two controllers beside each other, each with the slow start of those of Jobs and ReplicaSets: one pod, then
    /// two, then four (kubernetes v1.37.2, `slowStartBatch` in `pkg/controller/replicaset`).
    ByControllers,
}

/// What happens beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blows {
    None,
    /// The daemon is told to stop, or the kubelet, and comes back.
    Restarts,
    /// The same with SIGKILL: nobody could lower the count before.
    Kills,
    /// The daemon's pod is followed by the next, with `maxSurge: 1`.
    Updates,
}

/// Who replaces a pod that failed or was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successors {
    None,
    /// The driver, at once, as the controller of a Job does.
    Made,
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub name: &'static str,
    /// GPUs of the node.
    pub gpus: u32,
    pub arrivals: Arrivals,
    /// GPUs of a pod, with weights.
    pub sizes: &'static [(u32, u64)],
    /// From Running until it is deleted.
    pub lives: (Duration, Duration),
    /// So many of a thousand pods with one GPU live so long instead.
    pub long: Option<(u64, (Duration, Duration))>,
    /// So many of a thousand are deleted with grace 0.
    pub forced_per_mille: u64,
    /// So many of a thousand are deleted soon after they were created, wherever they are on their way.
    pub early_per_mille: u64,
    pub successors: Successors,
    pub blows: Blows,
    /// The first pod of each kind runs until all others are gone.
    pub first_stays: bool,
    /// Whether the kubelet is made to ask again where the node authorizer was late, so that what no driver can help
    /// does not keep a pod from running.
    pub nudges: bool,
    /// The goal of `tests/bench/README.md` is for it.
    pub has_goal: bool,
}

const fn ms(from: u64, to: u64) -> (Duration, Duration) {
    (Duration::from_millis(from), Duration::from_millis(to))
}

const HIGH: Load = Load {
    name: "high",
    gpus: 8,
    arrivals: Arrivals::Waiting,
    sizes: &[(1, 80), (2, 20)],
    lives: ms(1_000, 4_000),
    long: None,
    forced_per_mille: 200,
    early_per_mille: 20,
    successors: Successors::None,
    blows: Blows::None,
    first_stays: false,
    nudges: false,
    has_goal: true,
};

const MIXED_SIZES: &[(u32, u64)] = &[(1, 60), (2, 20), (4, 12), (8, 8)];

/// Every load, in the order of tables.
pub const LOADS: [Load; 10] = [
    HIGH,
    Load {
        name: "large",
        arrivals: Arrivals::Stream(Duration::from_secs(1)),
        sizes: MIXED_SIZES,
        has_goal: false,
        ..HIGH
    },
    Load {
        name: "mid",
        arrivals: Arrivals::Stream(Duration::from_secs(1)),
        sizes: MIXED_SIZES,
        long: Some((25, ms(30_000, 120_000))),
        ..HIGH
    },
    Load {
        name: "burst",
        arrivals: Arrivals::Bursts {
            each: 6,
            every: Duration::from_secs(25),
            made: Made::OneByOne,
        },
        sizes: &[(1, 1)],
        lives: ms(10_000, 12_000),
        early_per_mille: 0,
        ..HIGH
    },
    Load {
        name: "volley",
        arrivals: Arrivals::Bursts {
            each: 6,
            every: Duration::from_secs(25),
            made: Made::ByControllers,
        },
        sizes: &[(1, 1)],
        lives: ms(10_000, 12_000),
        early_per_mille: 0,
        has_goal: false,
        ..HIGH
    },
    Load {
        name: "one",
        gpus: 1,
        arrivals: Arrivals::Rounds {
            each: 1,
            pause: ms(2_000, 3_000),
        },
        sizes: &[(1, 1)],
        lives: ms(2_000, 3_000),
        forced_per_mille: 0,
        early_per_mille: 0,
        successors: Successors::Made,
        has_goal: false,
        ..HIGH
    },
    Load {
        name: "eight",
        arrivals: Arrivals::Rounds {
            each: 8,
            pause: ms(2_000, 3_000),
        },
        sizes: &[(1, 1)],
        lives: ms(2_000, 3_000),
        forced_per_mille: 0,
        early_per_mille: 0,
        successors: Successors::Made,
        has_goal: false,
        ..HIGH
    },
    Load {
        name: "restarts",
        blows: Blows::Restarts,
        has_goal: false,
        ..HIGH
    },
    Load {
        name: "kills",
        blows: Blows::Kills,
        has_goal: false,
        ..HIGH
    },
    Load {
        name: "updates",
        blows: Blows::Updates,
        first_stays: true,
        has_goal: false,
        ..HIGH
    },
];

impl Load {
    /// The load of a name.
    pub fn named(name: &str) -> Self {
        *LOADS
            .iter()
            .find(|load| load.name == name)
            .unwrap_or_else(|| {
                let names: Vec<_> = LOADS.iter().map(|load| load.name).collect();
                panic!("there is no load {name:?}; there are {}", names.join(", "))
            })
    }

    /// The most GPUs that a pod asks for.
    pub fn largest(&self) -> u32 {
        self.sizes.iter().map(|(gpus, _)| *gpus).max().unwrap_or(1)
    }
}

/// What one pod is going to do.
#[derive(Clone, Debug)]
pub struct Fate {
    pub gpus: u32,
    /// From Running until it is deleted.
    pub life: Duration,
    pub forced: bool,
    /// Deleted so long after it was created, if it still is there.
    pub early: Option<Duration>,
    /// It runs until all others are gone, whatever else is said here.
    pub stays: bool,
}

impl Fate {
    /// The next one of its kind. The same numbers are thrown for each pod, so that one load's pods are the same
    /// whatever happens to them.
    pub fn next(load: &Load, dice: &mut Dice) -> Self {
        /// Scheduling, binding and the start of a container fall into this time.
        const EARLY: (Duration, Duration) = ms(50, 500);
        let gpus = dice.weighted(load.sizes);
        let is_long = dice.below(1_000);
        let mut lives = load.lives;
        if let Some((cases, long)) = load.long
            && gpus == 1
            && is_long < cases
        {
            lives = long;
        }
        let life = dice.between(lives);
        let forced = dice.per_mille(load.forced_per_mille);
        let is_early = dice.per_mille(load.early_per_mille);
        let early = dice.between(EARLY);
        Self {
            gpus,
            life,
            forced,
            early: is_early.then_some(early),
            stays: false,
        }
    }

    /// The same, but that it runs until all others are gone.
    pub fn staying(self) -> Self {
        Self {
            forced: false,
            early: None,
            stays: true,
            ..self
        }
    }
}
