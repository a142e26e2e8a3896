//! What has been decided already: the same calls on the same pool, with the same to be seen, come again and again.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bridge_core::Pool;

use crate::daemon::{Call, Memory, Plan, Up, sight};
use crate::decide::{decide, plan_apart};
use crate::keyed::{Keyed, key_of};
use crate::node::Node;
use crate::properties::{self, Breach};
use crate::scope::Scope;
use crate::view::View;

/// Parts of the memory, so that threads seldom meet.
const PARTS: usize = 64;

/// Values by the hash of what they follow from.
type Parts<T> = [Mutex<HashMap<u64, T>>; PARTS];

fn parts<T>() -> Parts<T> {
    std::array::from_fn(|_| Mutex::new(HashMap::new()))
}

/// The part in which a value is.
fn part<T>(parts: &Parts<T>, key: u64) -> MutexGuard<'_, HashMap<u64, T>> {
    let place = usize::try_from(key).unwrap_or(0) % PARTS;
    parts[place].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A scope, and what was decided in it.
#[derive(Debug)]
pub(crate) struct Game {
    scope: Scope,
    decided: Parts<Result<Keyed<Plan>, Breach>>,
    /// Pools that came of it, few and large.
    memories: Parts<Result<Memory, Breach>>,
}

impl Deref for Game {
    type Target = Scope;

    fn deref(&self) -> &Scope {
        &self.scope
    }
}

impl Game {
    pub(crate) fn new(scope: Scope) -> Self {
        Self {
            scope,
            decided: parts(),
            memories: parts(),
        }
    }

    /// Plans some calls, in order: the arbiter's batch, as far as the commit.
    pub(crate) fn plan(&self, up: &Up, node: &Node, calls: &[Call]) -> Result<Keyed<Plan>, Breach> {
        let plan = self.recall(up, node, calls)?;
        properties::check_answers(self, node, up, &plan.answers)?;
        properties::check_count(self, node, &plan.after, &plan.answers)?;
        Ok(plan)
    }

    /// The mistake of deciding calls on the pool as it was before the batch.
    pub(crate) fn plan_apart(
        &self,
        up: &Up,
        node: &Node,
        calls: &[Call],
    ) -> Result<Keyed<Plan>, Breach> {
        let mut plans = Vec::new();
        for call in calls {
            plans.push(self.plan(up, node, &[*call])?);
        }
        let none = self.plan(up, node, &[])?;
        Ok(plan_apart(&plans, &none))
    }

    fn recall(&self, up: &Up, node: &Node, calls: &[Call]) -> Result<Keyed<Plan>, Breach> {
        let view = View::of(self, node, calls);
        let key = key_of(&(up.memory.pool.key(), up.memory.uptime, calls, &view));
        if let Some(plan) = part(&self.decided, key).get(&key) {
            return plan.clone();
        }
        let plan = decide(self, &up.memory, &view, calls).map(Keyed::new);
        part(&self.decided, key).insert(key, plan.clone());
        plan
    }

    /// A pool in its canonical form, and what follows from it.
    pub(crate) fn remember(&self, pool: Pool, uptime: Duration) -> Result<Memory, Breach> {
        let (pool, uptime) = pool.canonical(uptime, sight(self));
        let pool = Keyed::new(pool);
        let key = key_of(&(pool.key(), uptime));
        let mut part = part(&self.memories, key);
        let memory = part.entry(key);
        let checked = || {
            properties::check_pool(&pool)?;
            Ok(Memory::new(pool, uptime))
        };
        memory.or_insert_with(checked).clone()
    }
}
