//! What the API server's audit log says: the daemon's requests, and claims that the kubelet was refused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;

use super::life::Life;
use crate::world::{DAEMON_USER, World};

/// One event of the log, as far as it is read.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    #[serde(rename = "auditID")]
    audit_id: String,
    verb: String,
    user: User,
    #[serde(default)]
    object_ref: Object,
    #[serde(default)]
    response_status: Answer,
    request_received_timestamp: String,
}

#[derive(Debug, Clone, Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Object {
    #[serde(default)]
    resource: String,
    #[serde(default)]
    subresource: String,
    #[serde(default)]
    name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Answer {
    #[serde(default)]
    code: u16,
}

/// One request of the daemon.
#[derive(Debug, Clone)]
pub struct Request {
    /// As the monotonic clock has it.
    pub at: Duration,
    /// Such as `patch nodes/status`.
    pub what: String,
    pub writes: bool,
}

/// The log, read once.
#[derive(Debug, Default)]
pub struct Audit {
    pub requests: Vec<Request>,
    /// Names of claims that the node authorizer did not let the kubelet read.
    forbidden: BTreeSet<String>,
}

impl Audit {
    pub fn read(world: &World, clock: &Clock) -> Self {
        let text = std::fs::read_to_string(world.state().join("audit.log")).unwrap_or_default();
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut audit = Self::default();
        // A watch has two events, one when it begins and one when it ends.
        let mut seen = BTreeSet::new();
        for line in complete.lines() {
            let line: Line = serde_json::from_str(line).expect("the audit log has JSON lines");
            audit.note(&line, &mut seen, clock);
        }
        audit
    }

    fn note(&mut self, line: &Line, seen: &mut BTreeSet<String>, clock: &Clock) {
        if line.user.username == DAEMON_USER {
            if seen.insert(line.audit_id.clone()) {
                let separator = if line.object_ref.subresource.is_empty() {
                    ""
                } else {
                    "/"
                };
                self.requests.push(Request {
                    at: clock.monotonic(&line.request_received_timestamp),
                    what: format!(
                        "{} {}{separator}{}",
                        line.verb, line.object_ref.resource, line.object_ref.subresource
                    ),
                    writes: ["create", "update", "patch", "delete"].contains(&line.verb.as_str()),
                });
            }
            return;
        }
        if line.user.username.starts_with("system:node:")
            && line.object_ref.resource == "resourceclaims"
            && line.verb == "get"
            && line.response_status.code == 403
        {
            self.forbidden.insert(line.object_ref.name.clone());
        }
    }

    /// The daemon's requests between two times, by what they are.
    pub fn between(&self, from: Duration, to: Duration) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for request in &self.requests {
            if (from..=to).contains(&request.at) {
                *counts.entry(request.what.clone()).or_default() += 1;
            }
        }
        counts
    }

    /// Whether the kubelet was refused the pod's claim by the node authorizer, which had not seen the pod bound yet.
    /// It comes back after more than a minute, and no driver hears of the pod before.
    pub fn forbade_claim_of(&self, life: &Life) -> bool {
        life.claim
            .as_ref()
            .is_some_and(|claim| self.forbidden.contains(claim))
    }
}

/// The monotonic clock beside the wall clock, for logs that have only the latter.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Wall clock when the monotonic one was zero.
    zero: jiff::Timestamp,
}

impl Clock {
    pub fn now() -> Self {
        let zero = jiff::Timestamp::now()
            .checked_sub(super::life::now())
            .expect("the machine was started after 1970");
        Self { zero }
    }

    /// When a line of a Kubernetes program was written, and the line without its time: it has month and day, UTC here.
    pub fn klog<'line>(&self, line: &'line str) -> Option<(Duration, &'line str)> {
        let mut parts = line.splitn(3, ' ');
        let (day, time, what) = (parts.next()?, parts.next()?, parts.next()?);
        if day.len() != 5 || !day.is_ascii() {
            return None;
        }
        let year: String = jiff::Timestamp::now().to_string().chars().take(4).collect();
        let time = format!("{year}-{}-{}T{time}Z", &day[1..3], &day[3..5]);
        Some((self.monotonic(&time), what))
    }

    /// A time of day that is written as RFC 3339, on the monotonic clock; zero if it can't be read.
    pub fn monotonic(&self, time: &str) -> Duration {
        time.parse::<jiff::Timestamp>()
            .ok()
            .and_then(|time| Duration::try_from(time.duration_since(self.zero)).ok())
            .unwrap_or_default()
    }
}
