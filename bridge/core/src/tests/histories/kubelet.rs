//! The kubelet's two calls, with its choices and with what can go wrong around them.

use std::collections::BTreeSet;

use super::super::kit::POOL;
use super::pods::{Api, Containers, Kubelet, Pod, nth};
use super::world::World;
use super::{Ids, Shape, Then, invariants};
use crate::{
    AllocateOutcome, AllocateRequest, ClaimedDevice, DeviceId, Evidence, Health, Patience, Phase,
    PrepareOutcome, PrepareRequest, Standing, UnitId,
};

/// Asks of one Allocate before the last: the adapter asks each 50 ms for a second.
const ASKS: usize = 2;

impl World {
    /// The kubelet frees the ids of pods that are no longer active, at the next call that looks.
    pub(super) fn collect_book(&mut self) {
        if self.kubelet_ready {
            for pod in &mut self.pods {
                pod.booked &= pod.kubelet == Kubelet::Active;
            }
        }
    }

    fn booked_ids(&self) -> BTreeSet<DeviceId> {
        let booked = self.pods.iter().filter(|pod| pod.booked);
        booked
            .flat_map(|pod| pod.ids.iter().chain(&pod.init_ids).cloned())
            .collect()
    }

    /// Ids whose owner can be known when the kubelet gives them a second time. No list has the id of an ordinary init
    /// container, so its pod must be known to have started, and no id left over from an ended pod may look the same.
    fn forgettable(&self) -> Vec<DeviceId> {
        let started = |pod: &&Pod| pod.booked && pod.started && pod.ids.is_empty();
        let owners = self.pods.iter().filter(started).count();
        let holds = self.daemon.pool.ledger().holds.values().flatten();
        let granted = holds.filter(|hold| hold.phase() == Phase::Granted).count();
        let init_too = self.knows_pods && owners >= granted;
        let booked = self.pods.iter().filter(|pod| pod.booked);
        booked
            .flat_map(|pod| {
                let init = pod.init_ids.iter().filter(|_| pod.started && init_too);
                pod.ids.iter().chain(init).cloned()
            })
            .collect()
    }

    fn choose(&self, choice: Ids, size: usize) -> Option<Vec<DeviceId>> {
        let booked = self.booked_ids();
        let offers = self.daemon.pool.offers();
        let mut free: Vec<DeviceId> = offers
            .counted
            .iter()
            .filter(|offer| matches!(choice, Ids::Stale(_)) || offer.health == Health::Healthy)
            .map(|offer| offer.id.clone())
            .filter(|id| !booked.contains(id))
            .collect();
        match choice {
            Ids::Preferred => {
                let texts: Vec<String> = free.iter().map(ToString::to_string).collect();
                let preferred = offers.preferred(&texts, &[], size);
                free.sort_by_key(|id| {
                    let place = preferred.iter().position(|text| *text == id.to_string());
                    place.unwrap_or(usize::MAX)
                });
            }
            Ids::Any(n) | Ids::Stale(n) => {
                let by = usize::from(n) % free.len().max(1);
                free.rotate_left(by);
            }
            Ids::Forgotten(n) => {
                let running = self.forgettable();
                let place = nth(&running, n, |_| true)?;
                free.retain(|id| *id != running[place]);
                free.insert(0, running[place].clone());
            }
        }
        (free.len() >= size).then(|| free[..size].to_vec())
    }

    /// Admission of one pod: its containers one after the other, init containers first.
    pub(super) fn admit(&mut self, place: usize, ids: Ids, then: Then) -> Result<(), String> {
        self.kubelet_ready = true;
        self.collect_book();
        self.pods[place].kubelet = Kubelet::Active;
        let shape = self.pods[place].shape.expect("a counted pod is admitted");
        let size = if shape == Shape::Two { 2 } else { 1 };
        let Some(chosen) = self.choose(ids, size) else {
            self.reject(place);
            return Ok(());
        };
        let containers: &[bool] = match shape {
            Shape::One | Shape::Two | Shape::StatefulSet => &[false],
            Shape::InitOnly => &[true],
            Shape::InitAndApp => &[true, false],
        };
        for is_init in containers {
            let Some(units) = self.allocate(place, &chosen, then)? else {
                self.reject(place);
                return Ok(());
            };
            let pod = &mut self.pods[place];
            pod.booked = true;
            pod.units.extend(units.iter().cloned());
            pod.answers.push((chosen.clone(), units));
            if *is_init {
                pod.init_ids = chosen.clone();
            } else {
                pod.ids = chosen.clone();
            }
        }
        if then == Then::RejectedLater {
            self.reject(place);
        } else {
            self.pods[place].containers = Containers::Running;
        }
        Ok(())
    }

    fn reject(&mut self, place: usize) {
        let up = self.api_up;
        let pod = &mut self.pods[place];
        pod.kubelet = Kubelet::Inactive;
        pod.api = if up { Api::Terminal } else { Api::LiveForNow };
        pod.units.clear();
    }

    /// One Allocate, asked as the adapter asks. `None`: the kubelet got an error.
    fn allocate(
        &mut self,
        place: usize,
        ids: &[DeviceId],
        then: Then,
    ) -> Result<Option<Vec<UnitId>>, String> {
        let mut request = AllocateRequest {
            ids: ids.to_vec(),
            patience: Patience::Waits,
        };
        let mut evidence = Evidence { listing: None };
        for ask in 0..=ASKS {
            if ask == ASKS {
                request.patience = Patience::LastCall;
            }
            let outcome = self.ask(&request, &evidence, then);
            let outcome = if outcome == Some(AllocateOutcome::NeedsListing) {
                evidence.listing = Some(self.listing());
                self.ask(&request, &evidence, then)
            } else {
                outcome
            };
            match outcome {
                None => return Ok(None),
                Some(AllocateOutcome::NeedsListing) => {
                    return Err("a listing was asked for twice".to_owned());
                }
                Some(AllocateOutcome::Wait) => {}
                Some(AllocateOutcome::Refused(_)) => {
                    invariants::invariant_a_refusal_is_the_last_resort(self, ids)?;
                    return Ok(None);
                }
                Some(AllocateOutcome::Granted(grants)) => {
                    self.note_handed_over(place);
                    let units: Vec<UnitId> = grants.into_iter().map(|grant| grant.unit).collect();
                    invariants::invariant_what_is_granted_is_idle(self, &units)?;
                    if then == Then::DiesBeforeAnswer {
                        self.crash();
                        return Ok(None);
                    }
                    invariants::invariant_the_same_question_has_the_same_answer(
                        self, &request, &evidence, &units,
                    )?;
                    return Ok(Some(units));
                }
            }
        }
        Err("the last call was answered with Wait".to_owned())
    }

    /// `None`: the ledger could not be saved, so nothing has happened.
    fn ask(
        &mut self,
        request: &AllocateRequest,
        evidence: &Evidence,
        then: Then,
    ) -> Option<AllocateOutcome> {
        let before = self.daemon.clone();
        let outcome = self.act(|t| t.allocate(request, evidence));
        if then == Then::NotSaved && self.daemon.saved {
            self.daemon = before;
            return None;
        }
        Some(outcome)
    }

    /// NodePrepareResources for the claim of a pod: asked twice, as the adapter asks until its time is up.
    pub(super) fn prepare(&mut self, place: usize, then: Then) -> Result<(), String> {
        self.kubelet_ready = true;
        self.pods[place].kubelet = Kubelet::Active;
        let number = self.pods[place].claim.expect("a claim's pod is prepared");
        let claim = &self.claims[number];
        if !self.api_up || !claim.reserved_for.contains(&self.pods[place].uid) {
            return Ok(()); // the kubelet can't read the claim, or finds that it is not the pod's
        }
        if claim.prepared {
            self.start_with_claim(place, number);
            return Ok(());
        }
        let mut request = PrepareRequest {
            claim: claim.claim.clone(),
            devices: claim
                .devices
                .iter()
                .map(|(device, access)| ClaimedDevice {
                    requests: vec!["gpu".to_owned()],
                    pool: POOL.to_owned(),
                    device: device.clone(),
                    access: *access,
                })
                .collect(),
            arrived: self.daemon.uptime,
            patience: Patience::Waits,
        };
        self.claims[number].in_state = true;
        for ask in 1..=ASKS {
            if ask == ASKS {
                request.patience = Patience::LastCall;
            }
            let before = self.daemon.clone();
            let outcome = self.act(|t| t.prepare(&request));
            if then == Then::NotSaved && self.daemon.saved {
                self.daemon = before;
                return Ok(());
            }
            match outcome {
                PrepareOutcome::Wait(_) => {}
                PrepareOutcome::Refused(_) => return Ok(()),
                PrepareOutcome::Prepared(preparation) => {
                    invariants::invariant_what_is_prepared_is_idle(self, &before, &preparation)?;
                    if then == Then::DiesBeforeAnswer {
                        self.crash();
                        return Ok(());
                    }
                    let again = self.act(|t| t.prepare(&request));
                    if again != PrepareOutcome::Prepared(preparation) {
                        return Err(format!("the second Prepare was answered with {again:?}"));
                    }
                    self.claims[number].prepared = true;
                    self.start_with_claim(place, number);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn start_with_claim(&mut self, place: usize, claim: usize) {
        let ledger = self.daemon.pool.ledger();
        let units: BTreeSet<UnitId> = self.claims[claim]
            .owned()
            .filter_map(|device| ledger.unit_named(device).cloned())
            .collect();
        let pod = &mut self.pods[place];
        pod.containers = Containers::Running;
        pod.units = units;
    }

    /// Whether the daemon gives anything out.
    pub(super) fn serves(&self) -> bool {
        self.daemon.pool.standing() == Standing::Serving
    }
}
