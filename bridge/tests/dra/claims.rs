//! Which claims the arbiter hears of.

use std::time::Duration;

use bridge_core::{Access, Claims, TAINT_KEY, TaintEffect, Toleration};
use gpu_bridge::arbiter;
use gpu_bridge::dra::claims;
use serde_json::json;
use testkit::{ApiServer, eventually};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::world::{Arbiter, Asked, DEADLINE, NODE, Script, claim, client, result};

struct Watched {
    api: ApiServer,
    arbiter: Arbiter,
    out: watch::Receiver<Option<Claims>>,
    shutdown: CancellationToken,
    _task: JoinHandle<Result<(), arbiter::Error>>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Watched {
    fn start(api: ApiServer) -> Self {
        let arbiter = Arbiter::start(Script::default());
        let (sender, out) = watch::channel(None);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(claims::run(
            client(&api),
            NODE.to_owned(),
            arbiter.handle.clone(),
            sender,
            shutdown.clone(),
        ));
        Self {
            api,
            arbiter,
            out,
            shutdown,
            _task: task,
        }
    }

    /// Waits until the arbiter knows of exactly these claims.
    async fn until(&self, names: &[&str]) {
        let what = format!("the arbiter knows of {names:?}");
        eventually(&what, DEADLINE, || {
            self.known().is_some_and(|known| known == names)
        })
        .await;
    }

    fn known(&self) -> Option<Vec<String>> {
        let claims = self.arbiter.last_claims()??;
        Some(claims.claims.into_iter().map(|it| it.claim.name).collect())
    }

    fn told(&self) -> usize {
        let asked = self.arbiter.asked();
        asked
            .iter()
            .filter(|asked| matches!(asked, Asked::Claims(_)))
            .count()
    }
}

/// A claim that is allocated to a device of another node.
fn elsewhere(name: &str, uid: &str) -> serde_json::Value {
    let mut there = result("gpu", "gpu-0");
    there["pool"] = json!("node-b");
    claim(name, uid, &[there], &[])
}

#[tokio::test]
async fn the_arbiter_hears_of_claims_allocated_to_this_node() {
    let api = ApiServer::start().await.unwrap();
    let mut admin = result("watch/all", "gpu-1");
    admin["adminAccess"] = json!(true);
    api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0"), admin], &[]),
    );
    api.put("resourceclaims", elsewhere("other", "u2"));
    let watched = Watched::start(api);
    watched.until(&["llm"]).await;

    let claims = watched.arbiter.last_claims().unwrap().unwrap();
    let allocated = &claims.claims[0];
    let devices: Vec<_> = allocated
        .devices
        .iter()
        .map(|it| (it.request.as_str(), it.device.as_str(), it.access))
        .collect();
    assert_eq!(
        devices,
        [
            ("gpu", "gpu-0", Access::Owner),
            ("watch", "gpu-1", Access::Admin)
        ]
    );
    let pods: Vec<_> = allocated
        .reserved_for
        .iter()
        .map(|it| it.as_str())
        .collect();
    assert_eq!(pods, ["pod-1"]);
    assert_eq!(
        *watched.out.borrow(),
        Some(claims),
        "adoption sees the same"
    );
}

#[tokio::test]
async fn the_arbiter_hears_what_each_device_of_a_claim_tolerates() {
    let toleration = |key: Option<&str>, value: Option<&str>, effect| Toleration {
        key: key.map(str::to_owned),
        value: value.map(str::to_owned),
        effect,
        lasts: None,
    };
    let ours = Some(TAINT_KEY);
    let cases = [
        (json!({"operator": "Exists"}), toleration(None, None, None)),
        (
            json!({"key": TAINT_KEY, "operator": "Equal", "value": "Counted", "effect": "NoSchedule"}),
            toleration(ours, Some("Counted"), Some(TaintEffect::NoSchedule)),
        ),
        (
            json!({"key": TAINT_KEY, "value": "Counted", "effect": "NoExecute"}),
            toleration(ours, Some("Counted"), Some(TaintEffect::NoExecute)),
        ),
        (
            json!({"key": TAINT_KEY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 90}),
            Toleration {
                lasts: Some(Duration::from_secs(90)),
                ..toleration(ours, None, Some(TaintEffect::NoExecute))
            },
        ),
        (
            json!({"key": TAINT_KEY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": -1}),
            Toleration {
                lasts: Some(Duration::ZERO),
                ..toleration(ours, None, Some(TaintEffect::NoExecute))
            },
        ),
    ];
    let unknown = [
        json!({"key": TAINT_KEY, "operator": "Like", "effect": "NoExecute"}),
        json!({"key": TAINT_KEY, "operator": "Exists", "effect": "PreferNoSchedule"}),
    ];
    let given: Vec<_> = cases
        .iter()
        .map(|(given, _)| given)
        .chain(&unknown)
        .collect();
    let mut tolerating = result("gpu", "gpu-0");
    tolerating["tolerations"] = json!(given);
    let api = ApiServer::start().await.unwrap();
    let results = [tolerating, result("more", "gpu-1")];
    api.put("resourceclaims", claim("llm", "u1", &results, &[]));
    let watched = Watched::start(api);
    watched.until(&["llm"]).await;

    let claims = watched.arbiter.last_claims().unwrap().unwrap();
    let devices = &claims.claims[0].devices;
    let wanted: Vec<_> = cases.into_iter().map(|(_, wanted)| wanted).collect();
    assert_eq!(
        devices[0].tolerations, wanted,
        "what is not understood tolerates nothing"
    );
    assert_eq!(devices[1].tolerations, []);
}

#[tokio::test]
async fn allocation_and_deallocation_are_heard_of_and_nothing_else_is() {
    let watched = Watched::start(ApiServer::start().await.unwrap());
    watched.until(&[]).await;
    let mut pending = claim("llm", "u1", &[], &[]);
    pending["status"] = json!({});
    watched.api.put("resourceclaims", pending);
    watched.api.put("resourceclaims", elsewhere("other", "u2"));
    watched.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    watched.until(&["llm"]).await;
    assert_eq!(watched.told(), 2, "what is not ours is not told");

    let deallocated = json!({"status": {"allocation": null, "reservedFor": null}});
    watched
        .api
        .patch("resourceclaims", "train", "llm", &deallocated);
    watched.until(&[]).await;
    watched.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    watched.until(&["llm"]).await;
    watched.api.delete("resourceclaims", "train", "llm");
    watched.until(&[]).await;
}

#[tokio::test]
async fn nothing_is_told_before_the_first_list() {
    let api = ApiServer::start().await.unwrap();
    api.forbid("list", "resourceclaims");
    let watched = Watched::start(api);
    eventually("it tries", DEADLINE, || {
        watched.api.count("list", "resourceclaims") >= 2
    })
    .await;
    assert_eq!(watched.told(), 0);
    watched.api.allow("list", "resourceclaims");
    watched.until(&[]).await;
}

#[tokio::test]
async fn a_list_that_no_watch_follows_is_not_told() {
    let api = ApiServer::start().await.unwrap();
    api.forbid("watch", "resourceclaims");
    let watched = Watched::start(api);
    eventually("it tries", DEADLINE, || {
        watched.api.count("watch", "resourceclaims") >= 2
    })
    .await;
    assert_eq!(watched.told(), 0);
    watched.api.allow("watch", "resourceclaims");
    watched.until(&[]).await;
}

#[tokio::test]
async fn a_watch_that_is_too_old_lists_anew() {
    let watched = Watched::start(ApiServer::start().await.unwrap());
    watched.until(&[]).await;
    watched.api.go_away();
    watched.api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    watched.api.compact();
    watched.api.come_back();
    watched.until(&["llm"]).await;
    assert_eq!(watched.api.count("list", "resourceclaims"), 2);
}

#[tokio::test]
async fn a_short_break_changes_nothing_and_a_long_one_makes_the_claims_unknown() {
    let api = ApiServer::start().await.unwrap();
    api.put(
        "resourceclaims",
        claim("llm", "u1", &[result("gpu", "gpu-0")], &[]),
    );
    let watched = Watched::start(api);
    watched.until(&["llm"]).await;
    let watches = || watched.api.count("watch", "resourceclaims");

    let mut looks = 0;
    eventually("it watches again", DEADLINE, || {
        looks += 1;
        match looks {
            1 => watched.api.go_away(),
            10 => watched.api.come_back(),
            _ => {}
        }
        watches() >= 2
    })
    .await;
    watched.api.put(
        "resourceclaims",
        claim("more", "u2", &[result("gpu", "gpu-1")], &[]),
    );
    watched.until(&["llm", "more"]).await;
    assert_eq!(watched.told(), 2);
    // One at the start, and one with a single object, for its version alone.
    assert_eq!(
        watched.api.count("list", "resourceclaims"),
        2,
        "the watch went on"
    );

    watched.api.go_away();
    eventually("the claims are unknown", DEADLINE, || {
        watched.arbiter.last_claims() == Some(None)
    })
    .await;
    assert_eq!(*watched.out.borrow(), None);
    watched.api.delete("resourceclaims", "train", "llm");
    watched.api.come_back();
    watched.until(&["more"]).await;
}
