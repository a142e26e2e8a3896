//! The only owner of the pool: plan, save, commit, CDI, answer, publish the offers. One task, one queue.
//!
//! Everything that can change who has a GPU goes through [`Handle`]. Nothing else may hold a `&mut Pool`.

mod gate;
mod handle;
mod history;
mod rehearsal;
mod reports;
mod task;

pub use gate::OpenAllocate;
pub use handle::{
    AllocateReply, Call, ClearFault, Error, GrantedDevice, HOLD_LIMIT, Handle, LOOK_AGAIN, News,
    Observation, PrepareReply, PreparedReply, Release, TakenBack, Told,
};
pub use rehearsal::Rehearsal;
pub use task::{Arbiter, ProcessProbe};
