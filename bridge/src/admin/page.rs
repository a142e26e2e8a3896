//! The JSON of `/status` and `/readyz`: stable camelCase twins of the core's types.
//!
//! Fields are added, never renamed; a reader ignores what it does not know. Times are RFC 3339 in UTC with
//! milliseconds. `tests/golden/status.json` is a whole page.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bridge_core::{
    ClaimOffer, ClaimRef, CountedOffer, ForeignCause, Former, Health, Hold, HoldKind, Offers,
    PodRef, Prefer, Presence, Rival, Standing, Status, UnitStatus,
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::conditions::{Condition, ConditionName};

/// `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusPage {
    /// Name of the node, which is also the DRA pool.
    pub node: String,
    /// Version of the daemon.
    pub version: String,
    /// When the pool was in this state last: the time of its last commit.
    pub time: String,
    /// `legacy`, `both`, `dra` or `drained`.
    pub mode: String,
    /// Caps of the faces.
    pub limits: LimitsPage,
    /// How units are shared out where the limits leave room.
    pub weights: WeightsPage,
    /// Which free units counted pods get; a daemon that does not say knows the wiring alone.
    #[serde(default)]
    pub allocation: AllocationPage,
    /// Generation of the ledger: grows by one with every saved change.
    pub generation: u64,
    /// `Serving`, `WaitingForAdoption` or `LedgerUnreadable`.
    pub standing: String,
    /// Other daemons that serve `nvidia.com/gpu` or `gpu.nvidia.com` on this node; while there is one, nothing is offered.
    #[serde(default)]
    pub rivals: Vec<RivalPage>,
    /// Every unit of the node, in the order of the slice.
    pub units: Vec<UnitPage>,
    /// What the faces show.
    pub offers: OffersPage,
    /// What must be so before the node serves.
    pub conditions: Vec<ConditionPage>,
}

/// The most units that each face may hold; `null`: no cap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitsPage {
    /// Of the device plugin face.
    pub legacy: Option<u32>,
    /// Of the DRA face.
    pub dra: Option<u32>,
}

/// Weights of the split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeightsPage {
    /// Of the device plugin face.
    pub legacy: u32,
    /// Of the DRA face.
    pub dra: u32,
}

/// Which free units counted pods get of those that are alike otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocationPage {
    /// `wiring` or `tail`.
    pub prefer: String,
}

impl Default for AllocationPage {
    fn default() -> Self {
        Self::from(Prefer::default())
    }
}

impl From<Prefer> for AllocationPage {
    fn from(prefer: Prefer) -> Self {
        Self {
            prefer: prefer.as_str().to_owned(),
        }
    }
}

/// Another daemon that serves one of our names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RivalPage {
    /// Which of the two names it has: `legacy` (the resource) or `dra` (the driver).
    pub face: String,
    /// Where it shows: a socket, or what the kubelet counts.
    pub place: String,
    /// Its pod or process, where that is known.
    pub owner: Option<String>,
}

/// One unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnitPage {
    /// UUID.
    pub unit: String,
    /// Device name in the ResourceSlice.
    pub device: String,
    /// The kubelet's id that stands for the unit now; it names another UUID while a substitution lasts.
    pub id: Option<String>,
    /// NVML's product name.
    pub product: String,
    /// Where the unit is offered while it is free: `legacy`, `dra` or `rest` (both); `lowering`, `yielding` or `dark`
    /// on the way from one to the other.
    pub side: String,
    /// `FreeLegacy`, `FreeDra`, `FreeRest`, `Moving`, `Held`, `Lost`, `Faulty` or `Unseen`.
    pub state: String,
    /// Whether NVML sees the GPU.
    pub present: bool,
    /// The device node without which no container could use the GPU, and what is wrong with it; absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks: Option<String>,
    /// The error that closes the GPU, and what to do about it; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<FaultPage>,
    /// Who holds it; empty when it is free.
    pub holds: Vec<HoldPage>,
}

/// Why a GPU is offered to nobody.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultPage {
    /// The numbers of its errors.
    pub xids: Vec<u32>,
    /// When the first came.
    pub since: String,
    /// What happened, and what to do.
    pub message: String,
}

/// One hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HoldPage {
    /// `legacy`, `dra`, or `null` for what came through neither.
    pub face: Option<String>,
    /// `Granted`, `Bound`, `Reserved`, `Prepared` or `Foreign`.
    pub phase: String,
    /// How many of the unit's shares it takes.
    pub shares: u32,
    /// When the hold was first granted.
    pub since: String,
    /// The kubelet's id, of a counted pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The counted pod that has it, or had it when `cause` is `Lingering`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<HolderPage>,
    /// The claim that has it, or had it when `cause` is `Lingering`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<HolderPage>,
    /// Of a `Foreign` hold: `UnknownProcess`, `Lingering` (the former holder's process runs on) or
    /// `UnknownUnitOf` (the ledger was lost, and this pod has some unit).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

/// A pod or a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HolderPage {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`; `null` while no pod list has named the pod yet.
    pub uid: Option<String>,
}

/// What the faces show.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OffersPage {
    /// Every id of the device plugin's list.
    pub legacy: Vec<CountedOfferPage>,
    /// Every device of the ResourceSlice; `null`: there is no slice.
    pub dra: Option<Vec<ClaimOfferPage>>,
}

/// One id of the device plugin's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CountedOfferPage {
    /// The kubelet's id.
    pub id: String,
    /// The unit behind it now.
    pub unit: String,
    /// `Healthy` or `Unhealthy`.
    pub health: String,
    /// Whether a counted pod can still get it.
    pub free: bool,
}

/// One device of the ResourceSlice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimOfferPage {
    /// Device name.
    pub device: String,
    /// The unit behind it.
    pub unit: String,
    /// Value of the taint `gpu-bridge.dev/unit`; `null`: no taint.
    pub taint: Option<String>,
    /// Effect of that taint: `NoSchedule`, or `NoExecute` while the pods of a claim that lost a race are evicted.
    pub taint_effect: Option<String>,
    /// Whether a claim has it.
    pub held_by_claim: bool,
}

/// One condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConditionPage {
    /// See [`ConditionName`].
    pub name: String,
    /// Whether it is met.
    pub ok: bool,
    /// Whether it keeps the node from doing all that it could. What is not `ok` does; what is `ok` may, and then the
    /// node serves all the same.
    #[serde(default)]
    pub limits: bool,
    /// Why it limits the node, where `migration-guide/reasons` has a page of that name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When `ok`, `limits` or `reason` last changed.
    pub since: String,
    /// Why it stands so.
    pub message: String,
}

/// `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadyPage {
    /// Whether all conditions are met.
    pub ready: bool,
    /// Each of them.
    pub conditions: Vec<ConditionPage>,
}

impl StatusPage {
    /// The page of a node.
    #[must_use]
    pub fn new(
        node: &str,
        status: &Status,
        offers: &Offers,
        conditions: &BTreeMap<ConditionName, Condition>,
    ) -> Self {
        let settings = &status.settings;
        Self {
            node: node.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            time: time(status.at),
            mode: settings.mode.as_str().to_owned(),
            limits: LimitsPage {
                legacy: settings.limits.legacy,
                dra: settings.limits.dra,
            },
            weights: WeightsPage {
                legacy: settings.weights.legacy,
                dra: settings.weights.dra,
            },
            allocation: AllocationPage::from(settings.prefer),
            generation: status.generation,
            standing: standing(status.standing).to_owned(),
            rivals: status.rivals.iter().map(RivalPage::from).collect(),
            units: status.units.iter().map(UnitPage::from).collect(),
            offers: OffersPage::from(offers),
            conditions: condition_pages(conditions),
        }
    }
}

impl ReadyPage {
    /// The page of these conditions.
    #[must_use]
    pub fn new(conditions: &BTreeMap<ConditionName, Condition>) -> Self {
        Self {
            ready: conditions.values().all(|condition| condition.met.is_ok()),
            conditions: condition_pages(conditions),
        }
    }

    /// The same for anybody: without the messages, which may name pods.
    #[must_use]
    pub fn in_brief(conditions: &BTreeMap<ConditionName, Condition>) -> Self {
        let mut page = Self::new(conditions);
        for condition in &mut page.conditions {
            condition.message = "ask on the node itself".to_owned();
        }
        page
    }
}

impl From<&Rival> for RivalPage {
    fn from(rival: &Rival) -> Self {
        Self {
            face: rival.face.as_str().to_owned(),
            place: rival.place.clone(),
            owner: rival.owner.clone(),
        }
    }
}

impl From<&UnitStatus> for UnitPage {
    fn from(unit: &UnitStatus) -> Self {
        Self {
            unit: unit.unit.to_string(),
            device: unit.device.to_string(),
            id: unit.id.as_ref().map(ToString::to_string),
            product: unit.product_name.clone(),
            side: unit.side.as_str().to_owned(),
            state: unit.state.as_str().to_owned(),
            present: unit.presence == Presence::Present,
            lacks: unit.lacks.clone(),
            fault: unit.fault.as_ref().map(|status| FaultPage {
                xids: status.fault.xids.iter().map(|xid| xid.number()).collect(),
                since: time(status.fault.since),
                message: status.to_string(),
            }),
            holds: unit.holds.iter().map(HoldPage::from).collect(),
        }
    }
}

impl From<&Hold> for HoldPage {
    fn from(hold: &Hold) -> Self {
        let mut page = Self {
            face: hold.face().map(|face| face.as_str().to_owned()),
            phase: hold.phase().as_str().to_owned(),
            shares: hold.shares.get(),
            since: time(hold.since),
            id: hold.device_id().map(ToString::to_string),
            pod: None,
            claim: hold.claim().map(HolderPage::from),
            cause: None,
        };
        match &hold.kind {
            HoldKind::Bound { pod, .. } => page.pod = Some(pod.into()),
            HoldKind::Foreign { cause } => page.set_cause(cause),
            HoldKind::Granted { .. } | HoldKind::Reserved { .. } | HoldKind::Prepared { .. } => {}
        }
        page
    }
}

impl HoldPage {
    fn set_cause(&mut self, cause: &ForeignCause) {
        let word = match cause {
            ForeignCause::UnknownProcess => "UnknownProcess",
            ForeignCause::Lingering { former } => {
                match former {
                    Former::Counted(pod) => self.pod = pod.as_ref().map(HolderPage::from),
                    Former::Claim(claim) => self.claim = Some(claim.into()),
                }
                "Lingering"
            }
            ForeignCause::UnknownUnitOf { pod } => {
                self.pod = Some(pod.into());
                "UnknownUnitOf"
            }
        };
        self.cause = Some(word.to_owned());
    }
}

impl From<&PodRef> for HolderPage {
    fn from(pod: &PodRef) -> Self {
        Self {
            namespace: pod.name.namespace.clone(),
            name: pod.name.name.clone(),
            uid: pod.uid.as_ref().map(ToString::to_string),
        }
    }
}

impl From<&ClaimRef> for HolderPage {
    fn from(claim: &ClaimRef) -> Self {
        Self {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            uid: Some(claim.uid.to_string()),
        }
    }
}

impl From<&Offers> for OffersPage {
    fn from(offers: &Offers) -> Self {
        let claims = |claims: &Vec<ClaimOffer>| claims.iter().map(ClaimOfferPage::from).collect();
        Self {
            legacy: offers.counted.iter().map(CountedOfferPage::from).collect(),
            dra: offers.claims.as_ref().map(claims),
        }
    }
}

impl From<&CountedOffer> for CountedOfferPage {
    fn from(offer: &CountedOffer) -> Self {
        let health = match offer.health {
            Health::Healthy => "Healthy",
            Health::Unhealthy => "Unhealthy",
        };
        Self {
            id: offer.id.to_string(),
            unit: offer.unit.to_string(),
            health: health.to_owned(),
            free: offer.free,
        }
    }
}

impl From<&ClaimOffer> for ClaimOfferPage {
    fn from(offer: &ClaimOffer) -> Self {
        Self {
            device: offer.device.to_string(),
            unit: offer.gpu.uuid.to_string(),
            taint: offer.taint.map(|taint| taint.reason.as_str().to_owned()),
            taint_effect: offer.taint.map(|taint| taint.effect.as_str().to_owned()),
            held_by_claim: offer.held_by_claim,
        }
    }
}

fn condition_pages(conditions: &BTreeMap<ConditionName, Condition>) -> Vec<ConditionPage> {
    let page = |(name, condition): (&ConditionName, &Condition)| ConditionPage {
        name: name.as_str().to_owned(),
        ok: condition.met.is_ok(),
        limits: condition.met.is_limiting(),
        reason: condition.met.reason().map(str::to_owned),
        since: time(condition.since),
        message: condition.message.clone(),
    };
    conditions.iter().map(page).collect()
}

/// The word of [`StatusPage::standing`].
#[must_use]
pub fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Serving => "Serving",
        Standing::WaitingForAdoption => "WaitingForAdoption",
        Standing::LedgerUnreadable => "LedgerUnreadable",
    }
}

/// RFC 3339 in UTC. A clock outside the years that this can write is shown as the start of the epoch.
fn time(at: SystemTime) -> String {
    let at = Timestamp::try_from(at).unwrap_or(Timestamp::UNIX_EPOCH);
    format!("{at:.3}")
}
