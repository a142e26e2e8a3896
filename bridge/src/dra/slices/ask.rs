//! Requests about slices: what the API server may say instead of yes, and how long it may take.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;

use super::Error;
use crate::dra::chain;

/// How long the API server may take for one request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// What the server said instead of yes.
pub(super) enum Refusal {
    /// 404.
    Gone,
    /// 409.
    Conflict,
    /// Any other no.
    Denied(String),
    /// The server could not be asked.
    NoAnswer(String),
}

impl Refusal {
    pub(super) fn into_error(self, what: &'static str) -> Error {
        match self {
            Self::Gone => Error::Api {
                what,
                why: "there is no such object".to_owned(),
            },
            Self::Conflict => Error::Conflict { what },
            Self::Denied(why) | Self::NoAnswer(why) => Error::Api { what, why },
        }
    }
}

/// The answer, or what was said instead within [`ANSWER_TIMEOUT`].
pub(super) async fn ask<T>(answer: impl Future<Output = kube::Result<T>>) -> Result<T, Refusal> {
    match timeout(ANSWER_TIMEOUT, answer).await {
        Err(_) => Err(Refusal::NoAnswer(format!(
            "no answer within {} s",
            ANSWER_TIMEOUT.as_secs()
        ))),
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(Refusal::Gone),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(Refusal::Conflict),
        Ok(Err(error @ kube::Error::Api(_))) => Err(Refusal::Denied(chain(&error))),
        Ok(Err(error)) => Err(Refusal::NoAnswer(chain(&error))),
    }
}
