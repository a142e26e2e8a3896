//! Tells the arbiter which claims are allocated here, when that has changed.

use std::time::Duration;

use bridge_core::Claims;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use crate::arbiter::{self, Handle, Observation, Told};

/// When the arbiter could not save what it was told, it is told again after this. A full disk stays full for a while.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// What the arbiter was told last. `None` in its values stands for "not known".
pub(super) struct Teller {
    handle: Handle,
    out: watch::Sender<Option<Claims>>,
    told: Option<Option<Claims>>,
    /// When to tell again although nothing has changed.
    pub(super) retry_at: Option<Instant>,
}

impl Teller {
    pub(super) fn new(handle: Handle, out: watch::Sender<Option<Claims>>) -> Self {
        Self {
            handle,
            out,
            told: None,
            retry_at: None,
        }
    }

    /// Tells what is known now, if it is another than the last time.
    ///
    /// # Errors
    /// [`arbiter::Error::Stopping`] only.
    pub(super) async fn tell(&mut self, now: Option<Claims>) -> Result<(), arbiter::Error> {
        self.retry_at = None;
        if self.told.as_ref() == Some(&now) {
            return Ok(());
        }
        self.out.send_replace(now.clone());
        match self.handle.tell(Observation::Claims(now.clone())).await? {
            Told::Taken => self.told = Some(now),
            Told::NotTaken(error) => {
                warn!(error = %error, "the arbiter could not take the claims; they are told again");
                self.retry_at = Some(Instant::now() + TELL_AGAIN);
            }
        }
        Ok(())
    }
}
