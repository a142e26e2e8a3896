//! Every decision of gpu-bridge, and nothing else.
//!
//! This crate owns the pool: which units exist, who holds them, what each face offers, and what happens on
//! each call and each observation. It must not know sockets, files, clocks, protobuf, Kubernetes types or
//! serde: time and all that was seen come in as parameters, decisions go out as values.
//!
//! The one shape of use is **plan, save, commit, answer**:
//!
//! ```
//! use bridge_core::{Moment, Pool, Processes, Settings};
//! # let (now, processes) = (Moment::default(), Processes::default());
//! let mut pool = Pool::waiting(Settings::default());
//! let mut transition = pool.begin(now, processes); // a private copy of the pool
//! // decide: transition.allocate(..), transition.prepare(..), transition.observe_listing(..)
//! if let Some(ledger) = transition.ledger_to_save() {
//!     // store.save(ledger)?   <- nothing is committed or answered before this has succeeded
//! }
//! let reports = pool.commit(transition);
//! ```
//!
//! Start reading at [`Pool`], then [`Transition::allocate`] (rule 5) and [`Transition::prepare`] (rule 6).

mod adopt;
mod allocate;
mod arrivals;
#[cfg(any(test, feature = "model"))]
mod canonical;
mod confine;
mod count;
mod demand;
mod devices;
mod evidence;
mod fit;
mod foreign;
mod gpu;
mod handout;
mod health;
mod hold;
mod id;
mod inventory;
mod ledger;
mod listed;
mod lost_race;
mod observe;
mod offers;
mod pool;
mod prepare;
mod refusal;
mod release;
mod report;
mod rival;
mod settings;
mod split;
mod status;
mod steer;
mod taint;
#[cfg(test)]
mod tests;
mod topology;
mod units;

pub use adopt::{Adoption, CheckpointedDevices, CheckpointedResponse};
pub use allocate::{AllocateOutcome, AllocateRequest, Grant, Patience};
#[cfg(any(test, feature = "model"))]
pub use canonical::{Moves, Sight};
pub use demand::{Claimed, Demand, WaitingPod};
pub use devices::{DeviceRule, Faces, Matcher};
pub use evidence::{
    AllocatedClaim, AllocatedDevice, Asked, BoundPod, ClaimScope, Claims, Evidence, ListedClaim,
    ListedDevice, ListedPod, Listing, Moment, NamedClaims, PodPhase, PodSource, Pods, Process,
    Processes, UnitProcesses,
};
pub use fit::{Cordon, NodeShape, NodeTaint, NodeTerm, PodShape, PodToleration, Requirement, Test};
pub use gpu::Gpu;
pub use handout::{
    ContainerEdits, DeviceSpecs, HandedUnit, Handout, HostPath, IdStrategy, ListStrategy,
};
pub use health::{
    AWAY_LEAST, Fault, FaultEnd, IGNORED_XIDS, NotCleared, Recovery, STEADY_FIRST, STEADY_LONGEST,
    XIDS_OF_A_FAULT, Xid, XidAction, XidRules,
};
pub use hold::{ForeignCause, Former, Hold, HoldKind, Phase};
pub use id::{
    ClaimName, ClaimRef, ClaimUid, DeviceId, DeviceName, InvalidId, NAME_LIMIT, PodName, PodRef,
    PodUid, UnitId, is_object_name, shown,
};
pub use inventory::Inventory;
pub use ledger::{Access, Ledger, Preparation, PreparedDevice, Side, UnitKind, UnitRecord};
pub use lost_race::NotEvicted;
pub use offers::{ClaimOffer, CountedOffer, Health, Offers, SliceWanted};
pub use pool::{Pool, Presence, Standing, Transition};
pub use prepare::{ClaimedDevice, PrepareOutcome, PrepareRequest};
pub use refusal::{HolderKind, Refusal};
pub use release::{Insistence, NotReleased};
pub use report::{EndCause, Report};
pub use rival::{RIVAL_GONE, Rival};
pub use settings::{Face, Limits, Mode, Pace, Prefer, Settings, Weights};
pub use status::{FaultStatus, Status, UnitHealth, UnitState, UnitStatus};
pub use taint::{TAINT_KEY, Taint, TaintEffect, TaintReason, Toleration};
pub use topology::{Ancestor, Connection, Topology};
pub use units::Units;
