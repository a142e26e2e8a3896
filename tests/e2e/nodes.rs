//! Three nodes of one cluster, each with a daemon of its own, in different modes under one ConfigMap.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::arrivals::{Arrivals, FEW, a_while};
use crate::config_map;
use crate::objects::PodSpec;
use crate::record::{Holder, Use, now_ns};
use crate::world::{Setup, World};

/// The label of a Node by which it chooses a profile.
const PROFILE: &str = "gpu-bridge.dev/profile";
/// Nodes without the label count; each profile is another mode.
const CONFIG: &str = "mode: legacy\nprofiles:\n  mixed: {mode: both}\n  claims: {mode: dra}\n";
/// GPUs of each node: more than what is steady, so that there is room for what comes and goes.
const GPUS: u32 = 6;
/// Pods of each deployment while nodes are switched.
const STEADY: usize = 2;
/// Three kubelets and three daemons on two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// After a switch, until nothing is on its way to the node any more: schedulers decide by what they heard last.
const ON_THE_WAY: Duration = Duration::from_secs(2);
/// Deployments of pods by the count, and with claims. The arrivals have other names.
const COUNTED: &str = "steady-counts";
const CLAIMS: &str = "steady-claims";

/// Which pods may start on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counted,
    Claim,
}

impl Kind {
    fn of(used: &Use) -> Self {
        match used.holder {
            Holder::Counted(_) => Self::Counted,
            Holder::Claim(_) => Self::Claim,
        }
    }

    fn deployment(self) -> &'static str {
        match self {
            Self::Counted => COUNTED,
            Self::Claim => CLAIMS,
        }
    }
}

/// A time in which a node was closed to one kind.
#[derive(Debug)]
struct Closed {
    node: usize,
    kind: Kind,
    from_ns: u64,
    to_ns: u64,
}

/// The nodes; the first has the control plane, and ends last.
struct Nodes {
    members: Vec<World>,
    first: World,
}

impl Nodes {
    /// In the modes `legacy`, `both` and `dra`.
    async fn start() -> Option<Self> {
        let setup = || Setup::shared(GPUS).by_map().impatient();
        let members = ["node-1", "node-2"];
        let mut first = World::without_daemon(setup().with_members(&members)).await?;
        first.apply("components/config-map/rbac.yaml");
        first.configure_map(CONFIG).await;
        let mut joined = Vec::new();
        for (name, profile) in members.into_iter().zip(["mixed", "claims"]) {
            let member = first.join(name, setup().labelled(PROFILE, profile)).await?;
            joined.push(member);
        }
        for world in joined.iter_mut().chain([&mut first]) {
            world.spawn_daemon();
        }
        for world in joined.iter_mut().chain([&mut first]) {
            world.wait_ready().await;
        }
        Some(Self {
            members: joined,
            first,
        })
    }

    fn all(&self) -> impl Iterator<Item = &World> {
        std::iter::once(&self.first).chain(&self.members)
    }

    fn at(&self, node: usize) -> &World {
        self.all().nth(node).expect("there are three")
    }

    /// Waits until each node has its mode, its count, and its slice or none.
    async fn wait_modes(&self, modes: [&str; 3]) {
        for (world, mode) in self.all().zip(modes) {
            world.mode_is(mode).await;
            let count = if mode == "dra" { 0 } else { GPUS };
            let count = Some(count.to_string());
            let what = format!("{} shows what mode {mode} offers", world.name());
            world
                .wait_for(&what, SOON, async |world: &World| {
                    world.count().await == count && world.has_slice().await == (mode != "legacy")
                })
                .await;
        }
    }

    /// The nodes on which a deployment's pods run, each with how many.
    async fn places(&self, deployment: &str) -> BTreeMap<String, usize> {
        let mut places = BTreeMap::new();
        for pod in self.first.pods_of(deployment).await.into_values() {
            let phase = pod.status.and_then(|status| status.phase);
            let node = pod.spec.and_then(|spec| spec.node_name);
            if let (Some(node), Some("Running")) = (node, phase.as_deref()) {
                *places.entry(node).or_default() += 1;
            }
        }
        places
    }

    /// Waits until so many pods of a deployment run, and returns where.
    async fn wait_places(&self, deployment: &str, pods: usize) -> BTreeMap<String, usize> {
        let what = format!("{pods} pods of {deployment} run");
        self.first
            .wait_for(&what, SOON, async |_: &World| {
                self.places(deployment).await.values().sum::<usize>() == pods
            })
            .await;
        self.places(deployment).await
    }

    async fn scale(&self, deployment: &str, replicas: usize) {
        let change = json!({"spec": {"replicas": replicas}});
        let deployments = self.first.deployments();
        let scaled = deployments
            .patch(deployment, &PatchParams::default(), &Patch::Merge(&change))
            .await;
        scaled.expect("the deployment is scaled");
    }

    /// Switches a node over as an admin does: the verb waits, and what it waits for is deleted. Returns when it is through.
    async fn switch(&self, node: usize, mode: &'static str, closes: Option<Kind>) {
        let world = self.at(node);
        let name = world.name().to_owned();
        let state = self.first.state();
        let verb = tokio::task::spawn_blocking(move || {
            let limit = SOON.as_secs().to_string();
            let arguments = ["switch", mode, "--node", &name, "--timeout", &limit];
            config_map::verb(&state, &arguments)
        });
        world.mode_is(mode).await;
        if let Some(kind) = closes {
            self.move_away(kind.deployment(), world.name()).await;
        }
        let (said, code) = verb.await.expect("the verb starts");
        assert_eq!(code, Some(0), "{} to {mode}: {said}", world.name());
    }

    /// Deletes the pods of a deployment on a node; their successors have to go elsewhere.
    async fn move_away(&self, deployment: &str, node: &str) {
        for (name, pod) in self.first.pods_of(deployment).await {
            let its = pod.spec.and_then(|spec| spec.node_name);
            if its.as_deref() == Some(node) {
                self.first.delete(&name).await;
            }
        }
    }

    /// Nobody had what another one had, and nothing has started where its kind was closed out.
    fn judge(&self, closed: &[Closed]) {
        for (node, world) in self.all().enumerate() {
            let record = world.record();
            let doubles = record.doubles();
            assert!(doubles.is_empty(), "{}: {doubles:#?}", world.name());
            let its = |at: &&Closed| at.node == node;
            let strays: Vec<_> = closed
                .iter()
                .filter(its)
                .flat_map(|at| record.uses().into_iter().filter(|used| at.forbids(used)))
                .collect();
            assert!(strays.is_empty(), "{}: {strays:#?}", world.name());
        }
    }
}

impl Closed {
    fn forbids(&self, used: &Use) -> bool {
        self.kind == Kind::of(used) && (self.from_ns..self.to_ns).contains(&used.from_ns)
    }
}

/// The times in which nodes are closed to a kind, as the test goes on.
#[derive(Default)]
struct Diary {
    open: Vec<Closed>,
    past: Vec<Closed>,
}

impl Diary {
    fn closes(&mut self, node: usize, kind: Kind) {
        self.open.push(Closed {
            node,
            kind,
            from_ns: now_ns() + u64::try_from(ON_THE_WAY.as_nanos()).expect("seconds"),
            to_ns: u64::MAX,
        });
    }

    /// From here on nothing is said of a node any more.
    fn ends(&mut self, node: usize) {
        let (ended, open) = std::mem::take(&mut self.open)
            .into_iter()
            .partition(|at: &Closed| at.node == node);
        self.open = open;
        for at in ended {
            self.past.push(Closed {
                to_ns: now_ns(),
                ..at
            });
        }
    }

    fn all(mut self) -> Vec<Closed> {
        self.past.append(&mut self.open);
        self.past
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_of_one_config_map_take_the_pods_of_their_modes_and_are_switched_in_turn_under_churn()
 {
    let Some(nodes) = Nodes::start().await else {
        return;
    };
    let world = &nodes.first;
    let mut diary = Diary::default();
    nodes.wait_modes(["legacy", "both", "dra"]).await;
    diary.closes(0, Kind::Claim);
    diary.closes(2, Kind::Counted);

    // More than there is room for, of one kind and then of the other: what is over goes nowhere else.
    let all = usize::try_from(GPUS).expect("a few");
    world.create_template("one", 1).await;
    let counted = PodSpec::counted(COUNTED, 1);
    world
        .create_deployment(COUNTED, 2 * GPUS + 1, counted)
        .await;
    let places = nodes.wait_places(COUNTED, 2 * all).await;
    assert_eq!(
        places,
        BTreeMap::from([("node-0".to_owned(), all), ("node-1".to_owned(), all)])
    );
    nodes.scale(COUNTED, STEADY).await;
    let places = nodes.wait_places(COUNTED, STEADY).await;
    let room = 2 * all - places.get("node-1").copied().unwrap_or_default();
    let claimant = PodSpec::from_template(CLAIMS, "one", &["main"]);
    world
        .create_deployment(CLAIMS, 2 * GPUS + 1, claimant)
        .await;
    let places = nodes.wait_places(CLAIMS, room).await;
    assert_eq!(places.get("node-2"), Some(&all), "{places:?}");
    assert_eq!(places.get("node-1"), Some(&(room - all)), "{places:?}");
    nodes.scale(CLAIMS, STEADY).await;
    nodes.wait_places(CLAIMS, STEADY).await;

    // Each in turn, while pods of both kinds come and go; both kinds have a node at every moment.
    let arrivals = Arrivals::start(world, FEW);
    for (node, mode, closes) in [
        (0, "dra", Some(Kind::Counted)),
        (2, "legacy", Some(Kind::Claim)),
        (1, "dra", Some(Kind::Counted)),
        (1, "both", None),
    ] {
        a_while().await;
        diary.ends(node);
        nodes.switch(node, mode, closes).await;
        if let Some(kind) = closes {
            diary.closes(node, kind);
        }
    }
    a_while().await;
    let all: Vec<&World> = nodes.all().collect();
    arrivals.finish("nodes switched in turn", &all).await;
    nodes.wait_places(COUNTED, STEADY).await;
    nodes.wait_places(CLAIMS, STEADY).await;
    for deployment in [COUNTED, CLAIMS] {
        nodes.scale(deployment, 0).await;
        nodes.wait_places(deployment, 0).await;
    }
    nodes.wait_modes(["dra", "both", "legacy"]).await;
    for world in nodes.all() {
        world.wait_all_free().await;
    }
    nodes.judge(&diary.all());
    assert!(world.forbidden().is_empty(), "{:?}", world.forbidden());
}
