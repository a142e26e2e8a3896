//! What the daemon says about itself: `/healthz`, `/readyz` and `/status`, over HTTP on loopback and over the
//! admin socket.
//!
//! It reads watch values, asks the arbiter whether it is alive, and passes on that a successor wants the ledger. It
//! decides nothing and changes nothing.
//!
//! | path | answer |
//! |---|---|
//! | `/healthz` | 200 while the arbiter answers; 503 and a sentence if not |
//! | `/readyz` | [`ReadyPage`]; 200 when every condition is met, 503 if not |
//! | `/metrics` | numbers for Prometheus: [`crate::metrics`] |
//! | `/status` | [`StatusPage`] |
//! | `/` | the same for a browser |
//! | `POST /handover` | on the admin socket alone: gives the ledger to the pod whose UID is the body |
//! | `POST /clear-fault` | on the admin socket alone: ends the fault of the unit of a [`ClearFaultRequest`] |
//! | `POST /release` | on the admin socket alone: ends what holds the unit of a [`ReleaseRequest`], if nothing shows it |
//!
//! On an address that others than this node can reach, the first three are open, `/readyz` without its messages, and
//! the others are for whom the API server lets get the non-resource URL `/status`.

mod access;
mod client;
mod conditions;
mod listen;
mod page;
mod server;
mod web;

pub use crate::uds::{PATH_LIMIT_BYTES as SOCKET_PATH_LIMIT_BYTES, own_admin_socket};
pub use access::AUDIENCE;
pub use client::{ClientError, clear_fault, hand_over, probe, release, status};
pub use conditions::{Condition, ConditionName, Conditions, Met};
pub use listen::{ListenError, http_listener};
pub use page::{
    AllocationPage, ClaimOfferPage, ConditionPage, CountedOfferPage, FaultPage, HoldPage,
    HolderPage, LimitsPage, OffersPage, ReadyPage, RivalPage, StatusPage, UnitPage, WeightsPage,
    standing,
};
pub use server::{
    CLEAR_FAULT, ClearFaultRequest, HANDOVER, HEALTHZ, HandOver, METRICS, Pages, READYZ, RELEASE,
    ReleaseRequest, STATUS, report_ledger, serve_http, serve_socket,
};
pub use web::{PAGE, SCRIPT, STYLE};
