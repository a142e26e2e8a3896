//! What the arbiter does with a batch: each call is decided on one transition of the real pool, and checked.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime};

use bridge_core::{
    AllocateOutcome, AllocateRequest, CheckpointedResponse, Evidence, Grant, Listing, Moment,
    Patience, Pool, PrepareOutcome, Report, Transition,
};

use crate::broken::Broken;
use crate::daemon::{Answer, Call, Look, Memory, Plan};
use crate::decided::Game;
use crate::keyed::Keyed;
use crate::names::{claim_uid, id, number_of};
use crate::node::Source;
use crate::properties::{self, Breach};
use crate::scope::{FIRST_USER, Scope};
use crate::set::Set;
use crate::shown;
use crate::view::View;

/// Decides some calls on a pool, in order, on what is seen.
pub(crate) fn decide(
    scope: &Game,
    before: &Memory,
    view: &View,
    calls: &[Call],
) -> Result<Plan, Breach> {
    let planned = catch_unwind(AssertUnwindSafe(|| {
        let pool: &Pool = &before.pool;
        // No two things happen in one moment.
        let uptime = before.uptime + Duration::from_nanos(1);
        let mut transition = begin(scope, pool, view, uptime);
        let deciding = Deciding {
            scope,
            view,
            uptime,
        };
        let mut answers = Vec::with_capacity(calls.len());
        for call in calls {
            answers.push(deciding.decide(&mut transition, *call)?);
        }
        transition.pass_time();
        let saves = transition.ledger_to_save().is_some();
        let mut after = pool.clone();
        let reports = after.commit(transition);
        mark_over(&mut answers, &reports);
        for answer in &answers {
            deciding.ask_again(&after, *answer)?;
        }
        let after = scope.remember(after, uptime)?;
        Ok(Plan {
            after,
            saves,
            calls: calls.to_vec(),
            answers,
        })
    }));
    planned.unwrap_or(Err(Breach::Panic))
}

/// The mistake of deciding calls on the pool as it was before the batch: the last one is what is kept.
pub(crate) fn plan_apart(plans: &[Keyed<Plan>], none: &Keyed<Plan>) -> Keyed<Plan> {
    let last = plans.last().unwrap_or(none);
    Keyed::new(Plan {
        after: last.after.clone(),
        saves: last.saves,
        calls: plans.iter().flat_map(|plan| plan.calls.clone()).collect(),
        answers: plans.iter().flat_map(|plan| plan.answers.clone()).collect(),
    })
}

fn begin(scope: &Scope, pool: &Pool, view: &View, uptime: Duration) -> Transition {
    let processes = match scope.broken {
        Some(Broken::AsksForNoProcesses) => shown::no_processes(scope),
        Some(_) | None => shown::processes(scope, view),
    };
    let now = Moment {
        wall: SystemTime::UNIX_EPOCH,
        uptime,
    };
    pool.begin(now, processes)
}

/// Which of the granted units were handed over a process.
fn mark_over(answers: &mut [Answer], reports: &[Report]) {
    let mut handed = Set::EMPTY;
    for report in reports {
        if let Report::HandedOverBusy { unit, .. } = report {
            handed.insert(number_of(unit));
        }
    }
    for answer in answers {
        if let Answer::Granted { units, over, .. } = answer {
            *over = units.common(handed);
        }
    }
}

/// What the calls of a batch are decided on.
struct Deciding<'a> {
    scope: &'a Scope,
    view: &'a View,
    uptime: Duration,
}

impl Deciding<'_> {
    fn decide(&self, transition: &mut Transition, call: Call) -> Result<Answer, Breach> {
        match call {
            Call::Allocate { pod, ids } => self.allocate(transition, pod, ids),
            Call::Prepare { pod } => Ok(self.prepare(transition, pod, Patience::Waits)),
            Call::PrepareAtLast { pod } => Ok(self.prepare(transition, pod, Patience::LastCall)),
            Call::Unprepare { claim } => {
                transition.unprepare(&claim_uid(claim));
                Ok(Answer::Unprepared { claim })
            }
            Call::Look(look) => {
                self.look(transition, look);
                Ok(Answer::Seen)
            }
        }
    }

    /// Asks as the adapter does: patiently, and at last without patience.
    fn allocate(
        &self,
        transition: &mut Transition,
        pod: usize,
        ids: Set,
    ) -> Result<Answer, Breach> {
        if self.scope.broken == Some(Broken::AllocatesOverPrepared) {
            for claim in self.scope.claims() {
                transition.unprepare(&claim_uid(claim));
            }
        }
        match self.ask(transition, ids) {
            AllocateOutcome::Granted(grants) => Ok(Answer::Granted {
                pod,
                ids,
                units: units_of(&grants),
                over: Set::EMPTY,
            }),
            AllocateOutcome::Refused(_) => {
                properties::check_refusal(self.scope, self.view, transition.pool(), ids)?;
                Ok(Answer::Refused { pod })
            }
            AllocateOutcome::Wait => Err(Breach::WaitsAtLast),
            AllocateOutcome::NeedsListing => Err(Breach::ListsForEver),
        }
    }

    fn ask(&self, transition: &mut Transition, ids: Set) -> AllocateOutcome {
        let listing = match self.scope.broken {
            Some(Broken::AsksForNoListing) => Listing::default(),
            Some(_) | None => shown::listing(self.scope, &self.view.book),
        };
        let evidence = Evidence {
            listing: Some(listing),
        };
        let mut request = AllocateRequest {
            ids: ids.iter().map(id).collect(),
            patience: Patience::Waits,
        };
        let outcome = transition.allocate(&request, &evidence);
        if outcome != AllocateOutcome::Wait {
            return outcome;
        }
        request.patience = Patience::LastCall;
        transition.allocate(&request, &evidence)
    }

    fn prepare(&self, transition: &mut Transition, pod: usize, patience: Patience) -> Answer {
        let claim = self.scope.users[pod - FIRST_USER];
        let request = shown::request(self.view, claim, self.uptime, patience);
        match transition.prepare(&request) {
            PrepareOutcome::Prepared(preparation) => {
                let unit = preparation
                    .devices
                    .first()
                    .map(|device| number_of(&device.unit));
                unit.map_or(Answer::NotNow { pod }, |unit| Answer::Prepared {
                    pod,
                    unit,
                })
            }
            PrepareOutcome::Wait(_) | PrepareOutcome::Refused(_) => Answer::NotNow { pod },
        }
    }

    fn look(&self, transition: &mut Transition, look: Look) {
        let (scope, view) = (self.scope, self.view);
        let up = view.api == Source::Answers;
        match look {
            Look::Listing if scope.broken == Some(Broken::NeverLists) => {}
            Look::Listing => {
                let book = &view.book;
                transition.observe_listing(shown::listing(scope, book));
                if scope.broken == Some(Broken::TakesAbsenceForTheEnd) {
                    let mut listed = shown::pods(scope, view);
                    let is_listed = |pod: usize| book.pods[pod].is_some();
                    listed.pods.retain(|bound| {
                        let digit = bound.uid.as_str().bytes().last();
                        digit.is_some_and(|digit| is_listed(usize::from(digit - b'0')))
                    });
                    transition.observe_pods(Some(listed));
                }
            }
            Look::Pods => {
                let silent = scope.broken == Some(Broken::TakesSilenceForNothing);
                let pods = shown::pods(scope, view);
                transition.observe_pods((up || silent).then_some(pods));
            }
            Look::Claims => {
                let silent = scope.broken == Some(Broken::TakesSilenceForNothing);
                let claims = shown::claims(scope, view);
                transition.observe_claims((up || silent).then_some(claims));
            }
            Look::Processes => transition.observe_processes(),
            Look::Inventory => transition.observe_inventory(shown::inventory(scope, view)),
            Look::Node => {
                let wanted = transition.pool().offers().count;
                let count = view.count.map(|count| match scope.broken {
                    Some(Broken::MovesUnseen) => wanted,
                    Some(_) | None => count.into(),
                });
                transition.observe_node(count);
            }
            Look::Adoption => {
                let mut adoption = shown::adoption(scope, view);
                match scope.broken {
                    Some(Broken::AdoptsNoClaims) => adoption.claims.claims.clear(),
                    Some(Broken::AdoptsByIds) => {
                        for entry in &mut adoption.checkpoint {
                            let named = entry.ids.iter().map(|id| id.named_unit().clone());
                            entry.response = CheckpointedResponse::Units(named.collect());
                        }
                    }
                    Some(_) | None => {}
                }
                transition.adopt(adoption);
            }
            Look::Time => {}
        }
    }

    /// The same call once more: what was given is given again, unless it went over a process.
    fn ask_again(&self, pool: &Pool, answer: Answer) -> Result<(), Breach> {
        let mut transition = begin(self.scope, pool, self.view, self.uptime);
        let same = match answer {
            Answer::Granted {
                ids, units, over, ..
            } => {
                let outcome = self.ask(&mut transition, ids);
                !over.is_empty()
                    || matches!(outcome, AllocateOutcome::Granted(grants) if units_of(&grants) == units)
            }
            Answer::Prepared { pod, .. } => {
                self.prepare(&mut transition, pod, Patience::Waits) == answer
            }
            Answer::Refused { .. }
            | Answer::NotNow { .. }
            | Answer::Unprepared { .. }
            | Answer::Seen => true,
        };
        if same {
            Ok(())
        } else {
            Err(Breach::AnswersDiffer)
        }
    }
}

fn units_of(grants: &[Grant]) -> Set {
    grants.iter().map(|grant| number_of(&grant.unit)).collect()
}
