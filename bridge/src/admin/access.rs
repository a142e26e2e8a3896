//! Who may read what names pods, where the HTTP port can be reached from elsewhere: whoever the API server knows by a
//! bearer token, and lets `get` the non-resource URL `/status`.
//!
//! A token must be made for this port (`kubectl create token --audience gpu-bridge`). One that is good for the API server
//! itself is not taken: a node that was broken into could collect it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::server::STATUS;

/// The audience of tokens for this port.
pub const AUDIENCE: &str = "gpu-bridge";

/// How long a yes counts: the page asks every other second, and a right that is taken away ends within this time.
const YES_FOR: Duration = Duration::from_secs(30);

/// How long a no counts: a role may just be on its way.
const NO_FOR: Duration = Duration::from_secs(5);

/// Answers that are kept: some admins and their tokens. More make room by forgetting all.
const KEPT_LIMIT: usize = 64;

/// A token of a ServiceAccount is about one kilobyte. What is longer is none.
const TOKEN_LIMIT_BYTES: usize = 16 << 10;

/// How long the API server may take for each of the two questions.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Asks the API server who somebody is and what they may.
pub(super) struct Access {
    client: Client,
    /// By token. They are in memory alone, as they are in every server that checks them.
    kept: Mutex<BTreeMap<String, Kept>>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Kept {
    verdict: Verdict,
    until: Instant,
}

/// What the API server says of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// It may read.
    May,
    /// It is a token, and may not; whose it is.
    MayNot(String),
    /// It is no token for this port.
    Unknown,
}

impl Access {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            kept: Mutex::default(),
        }
    }

    /// Whether a request may read what names pods; if not, what it is answered.
    pub(super) async fn check(&self, headers: &HeaderMap) -> Result<(), Response> {
        let Some(token) = bearer(headers) else {
            return Err(unauthorized(
                "this page names pods: ask for it with a bearer token, as of kubectl create token NAME --audience gpu-bridge, \
                 or on the node itself",
            ));
        };
        let verdict = self.verdict(token, Instant::now()).await;
        let verdict = verdict.map_err(|why| {
            let text = format!("whether you may read this can't be told: {why}\n");
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        })?;
        match verdict {
            Verdict::May => Ok(()),
            Verdict::MayNot(user) => {
                let text = format!(
                    "{user} may not get {STATUS}; a role needs `nonResourceURLs: [{STATUS}]` with the verb get\n"
                );
                Err((StatusCode::FORBIDDEN, text).into_response())
            }
            Verdict::Unknown => Err(unauthorized(
                "the API server does not know this token, or it was not made for the audience gpu-bridge",
            )),
        }
    }

    /// What was said of a token a moment ago, or what is said now.
    async fn verdict(&self, token: &str, now: Instant) -> Result<Verdict, String> {
        if let Some(verdict) = self.known(token, now) {
            return Ok(verdict);
        }
        let verdict = self.ask(token).await?;
        self.keep(token, verdict.clone(), now);
        Ok(verdict)
    }

    fn known(&self, token: &str, now: Instant) -> Option<Verdict> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kept.get(token).filter(|it| now < it.until)?;
        Some(kept.verdict.clone())
    }

    fn keep(&self, token: &str, verdict: Verdict, now: Instant) {
        let lasts = match verdict {
            Verdict::May => YES_FOR,
            Verdict::MayNot(_) | Verdict::Unknown => NO_FOR,
        };
        let until = now + lasts;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT_LIMIT {
            kept.clear();
        }
        kept.insert(token.to_owned(), Kept { verdict, until });
    }

    async fn ask(&self, token: &str) -> Result<Verdict, String> {
        let Some(user) = self.who(token).await? else {
            return Ok(Verdict::Unknown);
        };
        let name = user.username.clone().unwrap_or_default();
        Ok(if self.may(user).await? {
            Verdict::May
        } else {
            Verdict::MayNot(name)
        })
    }

    /// Whose token it is; `None`: it is none for this port.
    async fn who(&self, token: &str) -> Result<Option<UserInfo>, String> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: Some(vec![AUDIENCE.to_owned()]),
            },
            ..TokenReview::default()
        };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let status = answered(api.create(&PostParams::default(), &review)).await?;
        let status = status.status.unwrap_or_default();
        // A server that knows no audiences answers without them, and the token may be for anybody.
        let audiences = status.audiences.unwrap_or_default();
        let ours = audiences.iter().any(|audience| audience == AUDIENCE);
        Ok(status
            .user
            .filter(|_| ours && status.authenticated == Some(true)))
    }

    async fn may(&self, user: UserInfo) -> Result<bool, String> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username,
                groups: user.groups,
                uid: user.uid,
                extra: user.extra,
                non_resource_attributes: Some(NonResourceAttributes {
                    path: Some(STATUS.to_owned()),
                    verb: Some("get".to_owned()),
                }),
                resource_attributes: None,
            },
            ..SubjectAccessReview::default()
        };
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let answer = answered(api.create(&PostParams::default(), &review)).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }
}

async fn answered<T>(answer: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match timeout(ANSWER_LIMIT, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => Err(status.message.clone()),
        // The causes are for the log: whoever asks may be anybody.
        Ok(Err(error)) => {
            debug!(%error, "the API server can't be asked who may read the pages");
            Err("the API server can't be asked".to_owned())
        }
        Err(_) => Err("the API server does not answer".to_owned()),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let header = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = header.split_once(' ')?;
    let token = token.trim();
    let good = scheme.eq_ignore_ascii_case("bearer") && !token.is_empty();
    (good && token.len() <= TOKEN_LIMIT_BYTES).then_some(token)
}

fn unauthorized(why: &str) -> Response {
    let headers = [(header::WWW_AUTHENTICATE, "Bearer realm=\"gpu-bridge\"")];
    (StatusCode::UNAUTHORIZED, headers, format!("{why}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use testkit::ApiServer;

    use super::*;

    #[tokio::test]
    async fn a_right_that_is_taken_away_or_given_is_noticed_when_the_last_answer_is_too_old() {
        let api = ApiServer::start().await.unwrap();
        let config = kube::Config::new(api.url().parse().expect("a URL"));
        let access = Access::new(Client::try_from(config).unwrap());
        let may_not = Verdict::MayNot("ann".to_owned());
        api.know_token("token", "ann", AUDIENCE);
        api.let_read("ann", STATUS);
        let start = Instant::now();
        assert_eq!(access.verdict("token", start).await, Ok(Verdict::May));
        api.let_read_no_more("ann", STATUS);
        let almost = start + YES_FOR - Duration::from_millis(1);
        assert_eq!(access.verdict("token", almost).await, Ok(Verdict::May));
        let later = start + YES_FOR;
        assert_eq!(access.verdict("token", later).await, Ok(may_not.clone()));
        api.let_read("ann", STATUS);
        let almost = later + NO_FOR - Duration::from_millis(1);
        assert_eq!(access.verdict("token", almost).await, Ok(may_not));
        let again = later + NO_FOR;
        assert_eq!(access.verdict("token", again).await, Ok(Verdict::May));
    }
}
