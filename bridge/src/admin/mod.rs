//! What the daemon says about itself: `/healthz`, `/readyz` and `/status`, over HTTP on loopback and over the
//! admin socket.
//!
//! It reads watch values and asks the arbiter whether it is alive. It decides nothing and changes nothing.
//!
//! | path | answer |
//! |---|---|
//! | `/healthz` | 200 while the arbiter answers; 503 and a sentence if not |
//! | `/readyz` | [`ReadyPage`]; 200 when every condition is met, 503 if not |
//! | `/status` | [`StatusPage`] |

mod client;
mod conditions;
mod listen;
mod page;
mod server;

pub use crate::uds::PATH_LIMIT_BYTES as SOCKET_PATH_LIMIT_BYTES;
pub use client::{ClientError, status};
pub use conditions::{Condition, ConditionName, Conditions, Met};
pub use listen::{ListenError, http_listener};
pub use page::{
    ClaimOfferPage, ConditionPage, CountedOfferPage, HoldPage, HolderPage, LimitsPage, OffersPage,
    ReadyPage, RivalPage, StatusPage, UnitPage, WeightsPage, standing,
};
pub use server::{HEALTHZ, Listeners, READYZ, STATUS, Sources, run};
