//! A walk through all states of a scope.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::actions::{Action, actions};
use crate::decided::Game;
use crate::play::State;
use crate::properties::{self, Breach};
use crate::reach::Reach;
use crate::rest::Rested;
use crate::scope::Scope;

/// How hard to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// About so many steps, the states that are nearest to the first one before all others.
    Steps(NonZeroUsize),
    /// Until every state is seen.
    Whole,
}

/// What a walk has found.
#[derive(Clone, Debug)]
pub struct Findings {
    /// Steps taken: states as often as they were reached.
    pub steps: usize,
    /// Different states.
    pub states: usize,
    /// The longest of the shortest ways to a state, in steps.
    pub depth: usize,
    /// Whether that is all there are.
    pub seen_whole: bool,
    /// How long it took.
    pub took: Duration,
    /// Each promise that is broken, with the way there.
    pub breaches: Vec<(String, Vec<String>)>,
    /// What should have come about and did not.
    pub missed: Vec<String>,
}

/// How many promises are checked: on states, and on steps.
pub const PROMISES: usize = 5 + Breach::COUNT;

/// The model: a scope, and what is known of its states.
#[derive(Debug)]
pub(crate) struct Walk {
    game: Game,
    rested: Rested,
    reached: [AtomicBool; Reach::ALL.len()],
}

/// Walks through the states of a scope, until all are seen, a promise is broken, or the effort is spent.
///
/// # Panics
/// A thread of the checker has panicked, which is a mistake in the model.
#[must_use]
pub fn walk(scope: &Scope, effort: Effort) -> Findings {
    let walk = Walk {
        game: Game::new(scope.clone()),
        rested: Rested::new(),
        reached: std::array::from_fn(|_| AtomicBool::new(false)),
    };
    let began = Instant::now();
    // One thread sees the same states in each run, and finds a shortest way to a breach.
    let checker = walk
        .checker()
        .threads(1)
        .finish_when(HasDiscoveries::AnyFailures);
    let checker = match effort {
        Effort::Steps(steps) => checker.target_state_count(steps.get()),
        Effort::Whole => checker,
    };
    let checker = checker.spawn_bfs().join();
    let took = began.elapsed();
    let breaches = checker.discoveries().into_iter().map(|(promise, path)| {
        let broken = path.last_state().broken;
        let promise = match broken {
            Some(breach) => format!("{breach:?}"),
            None => promise.to_owned(),
        };
        let way = path
            .into_actions()
            .into_iter()
            .map(|action| format!("{action:?}"));
        (promise, way.collect())
    });
    let within = match effort {
        Effort::Steps(steps) => checker.state_count() < steps.get(),
        Effort::Whole => true,
    };
    let walk = checker.model();
    let missed = scope
        .reaches
        .iter()
        .filter(|reach| !walk.reached[reach.place()].load(Ordering::Relaxed));
    Findings {
        steps: checker.state_count(),
        states: checker.unique_state_count(),
        depth: checker.max_depth(),
        seen_whole: within && breaches.len() == 0,
        took,
        breaches: breaches.collect(),
        missed: missed.map(|reach| format!("{reach:?}")).collect(),
    }
}

/// Walks through some scopes, as many at a time as there are processors, and tells of each once it is done.
pub fn walk_each(scopes: &[Scope], effort: Effort, tell: impl Fn(&Scope, Findings) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let next = AtomicUsize::new(0);
    std::thread::scope(|all| {
        for _ in 0..threads {
            all.spawn(|| {
                while let Some(scope) = scopes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    tell(scope, walk(scope, effort));
                }
            });
        }
    });
}

impl Walk {
    fn note(&self, state: &State) {
        for reach in self.game.reaches {
            let reached = &self.reached[reach.place()];
            if !reached.load(Ordering::Relaxed) && reach.is_so(&self.game, state) {
                reached.store(true, Ordering::Relaxed);
            }
        }
    }
}

impl Model for Walk {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::first(&self.game)]
    }

    fn actions(&self, state: &State, out: &mut Vec<Action>) {
        out.extend(actions(&self.game, state));
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        state.after(&self.game, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "every step keeps the rules",
                |walk: &Self, state: &State| {
                    walk.note(state);
                    state.broken.is_none()
                },
            ),
            Property::always("one holder for each unit", |walk: &Self, state: &State| {
                properties::one_holder(&walk.game, state)
            }),
            Property::always(
                "what was answered is on disk",
                |walk: &Self, state: &State| properties::answers_are_durable(&walk.game, state),
            ),
            Property::always(
                "no hold ends while its holder runs",
                |walk: &Self, state: &State| properties::memory_is_right(&walk.game, state),
            ),
            Property::always(
                "a prepared claim has its CDI file",
                |walk: &Self, state: &State| properties::claims_have_their_files(&walk.game, state),
            ),
            Property::always("everything comes to rest", |walk: &Self, state: &State| {
                state.broken.is_some() || walk.rested.comes_to_rest(&walk.game, state)
            }),
        ]
    }
}
