//! Claims noticed at bind: which of them the arbiter hears of, by readings alone.

use bridge_core::{
    ClaimName, ClaimRef, ClaimUid, Claims, Hold, HoldKind, NamedClaims, PodUid, Presence, Side,
    Status, UnitState, UnitStatus,
};
use gpu_bridge::arbiter;
use gpu_bridge::dra::claims;
use serde_json::json;
use testkit::{ApiServer, eventually};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::world::{Arbiter, DEADLINE, NODE, Script, claim, client, result, unit_of};

struct Reading {
    api: ApiServer,
    arbiter: Arbiter,
    named: watch::Sender<Option<NamedClaims>>,
    out: watch::Receiver<Option<Claims>>,
    shutdown: CancellationToken,
    _task: JoinHandle<Result<(), arbiter::Error>>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

fn name(name: &str) -> ClaimName {
    ClaimName {
        namespace: "train".to_owned(),
        name: name.to_owned(),
    }
}

impl Reading {
    fn start(api: ApiServer, earlier: &[&str]) -> Self {
        let arbiter = Arbiter::start(Script::default());
        let (sender, out) = watch::channel(None);
        let (named, seen) = watch::channel(None);
        let shutdown = CancellationToken::new();
        let inputs = claims::BoundInputs {
            client: client(&api),
            node: NODE.to_owned(),
            handle: arbiter.handle.clone(),
            named: seen,
            earlier: earlier.iter().map(|it| name(it)).collect(),
            out: sender,
        };
        let task = tokio::spawn(claims::run_bound(inputs, shutdown.clone()));
        Self {
            api,
            arbiter,
            named,
            out,
            shutdown,
            _task: task,
        }
    }

    /// The pods bound here, each with the claim that it names.
    fn bind(&self, pods: &[(&str, &str)]) {
        let mut all = NamedClaims::default();
        for (pod, claim) in pods {
            let names = all.by_pod.entry(PodUid::new(*pod).unwrap()).or_default();
            names.insert(name(claim));
        }
        self.named.send_replace(Some(all));
    }

    /// The ledger has the claim on `gpu-0`, in a phase.
    fn has_in_ledger(&self, kind: impl FnOnce(ClaimRef) -> HoldKind) {
        let claim = ClaimRef {
            uid: ClaimUid::new("u1").unwrap(),
            namespace: "train".to_owned(),
            name: "llm".to_owned(),
        };
        let device = bridge_core::DeviceName::new("gpu-0").unwrap();
        self.arbiter.status.send_modify(|status| {
            let mut changed = Status::clone(status);
            changed.claims = [claim.clone()].into();
            let at = changed.at;
            changed.units = vec![UnitStatus {
                unit: unit_of(&device),
                device,
                id: None,
                product_name: String::new(),
                side: Side::Dra,
                state: UnitState::Held,
                presence: Presence::Present,
                fault: None,
                lacks: None,
                holds: vec![Hold::exclusive(kind(claim), at)],
            }];
            *status = changed.into();
        });
    }

    async fn until(&self, what: &str, is_so: impl Fn(&Claims) -> bool) {
        eventually(what, DEADLINE, || {
            let last = self.arbiter.last_claims();
            last.flatten().is_some_and(|claims| is_so(&claims))
        })
        .await;
    }

    async fn until_known(&self, names: &[&str]) {
        let what = format!("the arbiter knows of {names:?}");
        self.until(&what, |known| {
            let known = known.claims.iter().map(|it| it.claim.name.as_str());
            known.collect::<Vec<_>>() == names
        })
        .await;
    }
}

fn llm() -> serde_json::Value {
    claim("llm", "u1", &[result("gpu", "gpu-0")], &[])
}

fn uid(text: &str) -> ClaimUid {
    ClaimUid::new(text).unwrap()
}

#[tokio::test]
async fn a_claim_is_noticed_when_a_pod_that_names_it_is_bound_and_nothing_is_listed() {
    let api = ApiServer::start().await.unwrap();
    api.forbid("list", "resourceclaims");
    api.forbid("watch", "resourceclaims");
    api.put("resourceclaims", llm());
    let reading = Reading::start(api, &[]);
    assert_eq!(reading.arbiter.last_claims().flatten(), None);
    reading.bind(&[]);
    reading.until_known(&[]).await;
    reading.bind(&[("pod-1", "llm")]);
    reading.until_known(&["llm"]).await;
    assert!(reading.out.borrow().is_some(), "adoption sees the same");
    for verb in ["list", "watch"] {
        assert_eq!(reading.api.count(verb, "resourceclaims"), 0);
    }
}

#[tokio::test]
async fn a_claim_of_the_ledger_is_read_until_it_is_deallocated() {
    let api = ApiServer::start().await.unwrap();
    api.put("resourceclaims", llm());
    let reading = Reading::start(api, &[]);
    reading.bind(&[("pod-1", "llm")]);
    reading.has_in_ledger(|claim| HoldKind::Prepared { claim });
    reading.until_known(&["llm"]).await;
    // The pod is gone and its claim given back; the controller has not deallocated it yet.
    reading.bind(&[]);
    reading.has_in_ledger(|claim| HoldKind::Reserved { claim });
    reading.until_known(&["llm"]).await;
    let before = reading.api.count("get", "resourceclaims");
    eventually("it is read again", DEADLINE, || {
        reading.api.count("get", "resourceclaims") > before + 1
    })
    .await;
    reading.until_known(&["llm"]).await;
    let deallocated = json!({"status": {"allocation": null, "reservedFor": null}});
    reading
        .api
        .patch("resourceclaims", "train", "llm", &deallocated);
    reading
        .until("it is known not to be allocated", |known| {
            known.claims.is_empty() && known.knows(&uid("u1"))
        })
        .await;
}

#[tokio::test]
async fn a_claim_that_was_made_anew_ends_the_one_before_it() {
    let api = ApiServer::start().await.unwrap();
    api.put("resourceclaims", claim("llm", "u2", &[], &[]));
    let reading = Reading::start(api, &[]);
    reading.has_in_ledger(|claim| HoldKind::Prepared { claim });
    reading.bind(&[]);
    reading
        .until("both are known", |known| {
            known.claims.is_empty() && known.knows(&uid("u1")) && known.knows(&uid("u2"))
        })
        .await;
}

#[tokio::test]
async fn what_the_kubelet_had_prepared_before_the_ledger_was_lost_is_read_too() {
    let api = ApiServer::start().await.unwrap();
    api.put("resourceclaims", llm());
    api.forbid("get", "resourceclaims");
    let reading = Reading::start(api, &["llm"]);
    reading.bind(&[]);
    eventually("it tries", DEADLINE, || {
        reading.api.count("get", "resourceclaims") >= 2
    })
    .await;
    assert_eq!(*reading.out.borrow(), None, "nothing is adopted yet");
    reading.api.allow("get", "resourceclaims");
    reading.until_known(&["llm"]).await;
}

#[tokio::test]
async fn an_api_server_that_is_away_makes_claims_unknown_and_never_gone() {
    let api = ApiServer::start().await.unwrap();
    api.put("resourceclaims", llm());
    let reading = Reading::start(api, &[]);
    reading.bind(&[("pod-1", "llm")]);
    reading.until_known(&["llm"]).await;
    reading.api.go_away();
    // Something happens here, so that it is read.
    reading.has_in_ledger(|claim| HoldKind::Reserved { claim });
    eventually("the claims are unknown", DEADLINE, || {
        let last = reading.arbiter.last_claims().flatten();
        assert!(last.as_ref().is_none_or(|known| known.claims.len() == 1));
        last.is_none()
    })
    .await;
    reading.api.come_back();
    reading.until_known(&["llm"]).await;
}
