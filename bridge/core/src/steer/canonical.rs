//! The canonical form of what steering remembers; see `canonical.rs` of the crate.

use std::collections::BTreeMap;
use std::time::Duration;

use super::demand::Waiting;
use super::{Motion, TURNS_IN_ROUND, Turn};
use crate::arrivals::Arrivals;
use crate::canonical::{Clocks, Moves};
use crate::settings::Pace;

impl Motion {
    pub(crate) fn pods_known_since(&self) -> impl Iterator<Item = Duration> {
        self.known_pods.values().copied()
    }

    /// The canonical form on another clock.
    pub(crate) fn canonical(self, clocks: &Clocks, pace: Pace, moves: Moves) -> Self {
        let Self {
            node,
            was_shown,
            known_pods,
            known_claims,
            arrivals,
            promised_since,
            free_since,
            lowered_since,
            withdrawn_since,
            outgoing,
            shown_to_claims,
            dark_since,
            turn,
            burst_ends,
            waiting,
            wake_at: _, // found anew by each transition, for the arbiter alone
            leaving,
            clear_since,
            clear,
        } = self;
        let known_pods = clocks.in_order(known_pods);
        let settled = |since: Duration| clocks.past(since, pace.settle);
        let standing = Self {
            node,
            was_shown,
            known_pods,
            known_claims,
            arrivals: Arrivals::default(),
            promised_since: clocks.among_themselves(promised_since),
            free_since: BTreeMap::new(),
            lowered_since: None,
            withdrawn_since: BTreeMap::new(),
            outgoing,
            shown_to_claims,
            dark_since: BTreeMap::new(),
            turn: None,
            burst_ends: None,
            waiting: Waiting::default(),
            wake_at: None,
            leaving,
            clear_since: clear_since.map(settled),
            clear,
        };
        match moves {
            Moves::Never => standing,
            Moves::Happen => Self {
                arrivals: arrivals.canonical(clocks, pace.quiet),
                free_since: clocks.all(free_since, |since| clocks.past(since, pace.dwell)),
                lowered_since: lowered_since.map(settled),
                withdrawn_since: clocks.all(withdrawn_since, settled),
                dark_since: clocks.all(dark_since, settled),
                turn: turn.map(|turn| Turn {
                    number: turn.number % TURNS_IN_ROUND,
                    ends: clocks.to_come(turn.ends),
                    ..turn
                }),
                burst_ends: burst_ends.and_then(|ends| clocks.yet_to_come(ends)),
                waiting: waiting.canonical(clocks),
                ..standing
            },
        }
    }
}
