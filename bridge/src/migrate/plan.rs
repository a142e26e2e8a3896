//! What a change of mode means for one node: a function of who has what, and of nothing else.

use std::fmt;

use bridge_core::{Face, Mode};
use serde::Serialize;

use crate::admin::{HoldPage, StatusPage};

/// Somebody who has GPUs of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// `pod` or `claim`.
    pub kind: &'static str,
    /// `metadata.namespace`; empty while nobody has named the pod yet.
    pub namespace: String,
    /// `metadata.name`; empty while nobody has named the pod yet.
    pub name: String,
    /// How many GPUs.
    pub gpus: u32,
    /// The pods that use it, if it is a claim and they are known.
    pub pods: Vec<String>,
}

impl Holder {
    /// The face through which it has them.
    fn face(&self) -> Face {
        if self.kind == "claim" {
            Face::Dra
        } else {
            Face::Legacy
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.is_empty() {
            f.write_str("a counted pod that is just starting")?;
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)?;
        }
        let plural = if self.gpus == 1 { "" } else { "s" };
        write!(f, " ({} GPU{plural}", self.gpus)?;
        if !self.pods.is_empty() {
            write!(f, ", used by {}", self.pods.join(", "))?;
        }
        f.write_str(")")
    }
}

/// Whether counted pods can get GPUs by claims that Kubernetes makes for them (KEP-5004).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapped {
    /// Nobody could ask.
    Unknown,
    /// No class says so.
    No,
    /// None says so, and this Kubernetes keeps no such word of a class unless a feature gate is set: before 1.36.
    NotKept,
    /// A class has `extendedResourceName: nvidia.com/gpu`.
    By(MappedClass),
    /// A class has it, and the scheduler does not go by it on a node that has a device plugin for the resource or had
    /// one: Kubernetes 1.34.
    NotHere(MappedClass),
}

/// The class by which Kubernetes makes claims for counted pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedClass {
    /// The one that counts: the newest, and of two of one moment the first by name (KEP-5004).
    pub name: String,
    /// Others that have the resource's name too, and are passed over.
    pub passed_over: Vec<String>,
}

impl fmt::Display for MappedClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceClass {}", self.name)?;
        if self.passed_over.is_empty() {
            return Ok(());
        }
        let others = self.passed_over.join(", ");
        write!(f, " (the newest that has the name, before {others})")
    }
}

/// What is known of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeView {
    /// Its name.
    pub node: String,
    /// Its mode, where a daemon was asked.
    pub mode: Option<String>,
    /// Who has GPUs.
    pub holders: Vec<Holder>,
    /// Why a change may not go as planned.
    pub doubts: Vec<String>,
    /// What becomes of counted pods without the device plugin.
    pub mapped: Mapped,
    /// What others read of the Node; empty where the Node was not read.
    pub marks: Marks,
}

/// What of a Node the autoscaler and pods go by.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Marks {
    /// Its label by which cluster-autoscaler expects a count of GPUs above 0.
    pub expects_count: Option<&'static str>,
    /// Its taints with the counted resource as their key, as `key=value:effect`.
    pub taints: Vec<String>,
}

/// What a change of mode means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// The node.
    pub node: String,
    /// Its mode now, where that is known.
    pub from: Option<String>,
    /// The mode after the change.
    pub to: &'static str,
    /// Whether the change is complete as soon as it is made: nobody has to end first, and nothing is in doubt.
    pub go: bool,
    /// Who has to end before the change is complete. Nobody is ended by it.
    pub first: Vec<Holder>,
    /// What changes for the pods that come next.
    pub next: Vec<String>,
    /// Why it may not go as planned.
    pub doubts: Vec<String>,
}

/// Those for whom a mode is closed.
pub(super) fn closed_out(holders: &[Holder], to: Mode) -> Vec<Holder> {
    let closed = |holder: &&Holder| !to.opens(holder.face());
    holders.iter().filter(closed).cloned().collect()
}

/// What a change to a mode means for a node.
#[must_use]
pub fn plan(view: &NodeView, to: Mode) -> Plan {
    let first = closed_out(&view.holders, to);
    Plan {
        node: view.node.clone(),
        from: view.mode.clone(),
        to: to.as_str(),
        go: first.is_empty() && view.doubts.is_empty(),
        first,
        next: next(view, to),
        doubts: view.doubts.clone(),
    }
}

fn next(view: &NodeView, to: Mode) -> Vec<String> {
    let mut next = counted_next(view, to);
    if !to.opens(Face::Dra) {
        let waits = "pods with claims for gpu.nvidia.com find no GPU on this node and wait, or go elsewhere";
        next.push(waits.to_owned());
        return next;
    }
    let quota = match &view.mapped {
        Mapped::By(class) => {
            format!(
                "counts those of DeviceClass {} too, in the whole cluster",
                class.name
            )
        }
        Mapped::No | Mapped::NotKept | Mapped::NotHere(_) | Mapped::Unknown => {
            "does not count them".to_owned()
        }
    };
    next.push(format!(
        "pods with claims for gpu.nvidia.com get free GPUs of this node; a quota of requests.nvidia.com/gpu {quota}"
    ));
    if !view.marks.taints.is_empty() {
        next.push(format!(
            "these pods have to tolerate {} themselves: what adds a toleration to pods that ask for a count \
             (ExtendedResourceToleration) does not see claims",
            view.marks.taints.join(" and ")
        ));
    }
    if let Some(label) = view.marks.expects_count {
        next.push(format!(
            "cluster-autoscaler judges by the count alone whether a node with the label {label} is in use, so pods with \
             claims do not keep it from being scaled down: migration-guide/autoscalers.md"
        ));
    }
    next
}

/// What changes for pods that ask for a count.
fn counted_next(view: &NodeView, to: Mode) -> Vec<String> {
    let mapped = &view.mapped;
    let mut next = Vec::new();
    if to.opens(Face::Legacy) {
        let served =
            "pods that ask for nvidia.com/gpu get free GPUs of this node by the device plugin";
        next.push(served.to_owned());
        if let (Mapped::By(class), Mode::Both) = (mapped, to) {
            next.push(format!(
                "but not while the count of this node is 0: {class} has the extendedResourceName nvidia.com/gpu, so they \
                 get claims then; offers.minLegacy: 1 keeps the count above 0"
            ));
        }
        return next;
    }
    let nothing =
        "pods that ask for nvidia.com/gpu find no GPU on this node and wait, or go elsewhere";
    next.push(match (mapped, to.opens(Face::Dra)) {
        (Mapped::By(class), true) => format!(
            "pods that ask for nvidia.com/gpu get GPUs of this node by claims that Kubernetes makes for them, since \
             {class} has that name, as on every node whose count is 0; a quota of \
             {}.deviceclass.resource.k8s.io/devices counts them",
            class.name
        ),
        (Mapped::No, true) | (_, false) => nothing.to_owned(),
        (Mapped::NotKept, true) => format!(
            "{nothing}: no DeviceClass can change that, since Kubernetes before 1.36 keeps no extendedResourceName unless \
             the feature gate DRAExtendedResource is on"
        ),
        (Mapped::NotHere(class), true) => format!(
            "{nothing}: {class} has that name, but the scheduler of Kubernetes 1.34 goes by it only on nodes that have \
             never had a device plugin for it"
        ),
        (Mapped::Unknown, true) => {
            "pods that ask for nvidia.com/gpu find no GPU on this node, unless a DeviceClass has the \
             extendedResourceName nvidia.com/gpu: look with kubectl get deviceclasses -o yaml"
                .to_owned()
        }
    });
    let broken = view.marks.expects_count.map_or_else(
        || "an autoscaler may take the node for a broken one".to_owned(),
        |label| {
            format!(
                "with it and the label {label} cluster-autoscaler takes the node for an unready one"
            )
        },
    );
    next.push(format!(
        "the Node's count of nvidia.com/gpu goes to 0; {broken}: migration-guide/autoscalers.md"
    ));
    next
}

/// What a daemon's page says about its node.
#[must_use]
pub fn view_of_page(page: &StatusPage) -> NodeView {
    let mut holders: Vec<Holder> = Vec::new();
    let holds = page.units.iter().flat_map(|unit| &unit.holds);
    for holder in holds.filter_map(holder_of) {
        let same = |it: &&mut Holder| {
            (it.kind, &it.namespace, &it.name) == (holder.kind, &holder.namespace, &holder.name)
        };
        match holders.iter_mut().find(same) {
            Some(known) => known.gpus += holder.gpus,
            None => holders.push(holder),
        }
    }
    holders.sort();
    let mut doubts = Vec::new();
    if page.standing != "Serving" {
        doubts.push(format!(
            "the ledger is {}, so nothing is given out",
            page.standing
        ));
    }
    for rival in &page.rivals {
        doubts.push(format!(
            "another daemon serves {} here: {}",
            rival.face, rival.place
        ));
    }
    let config = page.conditions.iter().find(|it| it.name == "ConfigInForce");
    if let Some(config) = config.filter(|it| it.limits || !it.ok) {
        doubts.push(config.message.clone());
    }
    NodeView {
        node: page.node.clone(),
        mode: Some(page.mode.clone()),
        holders,
        doubts,
        mapped: Mapped::Unknown,
        marks: Marks::default(),
    }
}

/// Who has something through a face; `None`: it came through neither.
fn holder_of(hold: &HoldPage) -> Option<Holder> {
    let kind = match hold.face.as_deref()? {
        "dra" => "claim",
        _ => "pod",
    };
    let named = hold
        .claim
        .as_ref()
        .filter(|_| kind == "claim")
        .or(hold.pod.as_ref());
    let text = |text: Option<&String>| text.cloned().unwrap_or_default();
    Some(Holder {
        kind,
        namespace: text(named.map(|it| &it.namespace)),
        name: text(named.map(|it| &it.name)),
        gpus: 1,
        pods: Vec::new(),
    })
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = self
            .from
            .as_ref()
            .map_or(String::new(), |from| format!(" from {from}"));
        writeln!(
            f,
            "node {}{from} to {}: {}",
            self.node,
            self.to,
            if self.go { "go" } else { "no-go" }
        )?;
        let section = |f: &mut fmt::Formatter<'_>, head: &str, lines: &[String]| {
            if lines.is_empty() {
                return Ok(());
            }
            writeln!(f, "\n{head}")?;
            lines.iter().try_for_each(|line| writeln!(f, "  {line}"))
        };
        let first: Vec<String> = self.first.iter().map(ToString::to_string).collect();
        section(
            f,
            "has to end first, and is ended by nobody but you:",
            &first,
        )?;
        section(f, "what changes for the pods that come next:", &self.next)?;
        section(f, "what may stand in the way:", &self.doubts)
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn page() -> StatusPage {
        let golden = include_str!("../../../tests/golden/status.json");
        let mut page: StatusPage = serde_json::from_str(golden).unwrap();
        // What is in doubt has a test of its own.
        page.conditions.clear();
        page.rivals.clear();
        page
    }

    #[test]
    fn a_plan_names_who_has_to_end_first_and_what_changes() {
        let view = view_of_page(&page());
        expect![[r#"
            node node-1 from both to dra: no-go

            has to end first, and is ended by nobody but you:
              a counted pod that is just starting (1 GPU)
              pod default/counted (1 GPU)

            what changes for the pods that come next:
              pods that ask for nvidia.com/gpu find no GPU on this node, unless a DeviceClass has the extendedResourceName nvidia.com/gpu: look with kubectl get deviceclasses -o yaml
              the Node's count of nvidia.com/gpu goes to 0; an autoscaler may take the node for a broken one: migration-guide/autoscalers.md
              pods with claims for gpu.nvidia.com get free GPUs of this node; a quota of requests.nvidia.com/gpu does not count them
        "#]].assert_eq(&plan(&view, Mode::Dra).to_string());
        expect![[r#"
            node node-1 from both to legacy: no-go

            has to end first, and is ended by nobody but you:
              claim train/llm (2 GPUs)

            what changes for the pods that come next:
              pods that ask for nvidia.com/gpu get free GPUs of this node by the device plugin
              pods with claims for gpu.nvidia.com find no GPU on this node and wait, or go elsewhere
        "#]]
        .assert_eq(&plan(&view, Mode::Legacy).to_string());
        let drained = plan(&view, Mode::Drained);
        let both = plan(&view, Mode::Both);
        assert!(!drained.go && both.go && both.first.is_empty());
        let names = |plan: &Plan| plan.first.len();
        assert_eq!(
            names(&drained),
            names(&plan(&view, Mode::Dra)) + names(&plan(&view, Mode::Legacy))
        );
    }

    #[test]
    fn a_node_without_holders_goes_over_at_once_unless_something_is_in_doubt() {
        let mut page = page();
        for unit in &mut page.units {
            unit.holds.clear();
        }
        assert!(plan(&view_of_page(&page), Mode::Dra).go);
        page.standing = "WaitingForAdoption".to_owned();
        let plan = plan(&view_of_page(&page), Mode::Dra);
        assert!(!plan.go && plan.doubts.len() == 1, "{plan}");
    }

    #[test]
    fn with_a_mapped_class_counted_pods_go_on_by_claims() {
        let mut view = view_of_page(&page());
        let waits = |view: &NodeView, to| {
            plan(view, to)
                .next
                .iter()
                .any(|line| line.contains("and wait"))
        };
        assert!(!waits(&view, Mode::Dra));
        view.mapped = Mapped::No;
        assert!(waits(&view, Mode::Dra));
        let class = MappedClass {
            name: "gpu.nvidia.com".to_owned(),
            passed_over: vec!["old".to_owned()],
        };
        for (older, words) in [
            (Mapped::NotKept, "before 1.36 keeps no extendedResourceName"),
            (
                Mapped::NotHere(class.clone()),
                "the scheduler of Kubernetes 1.34",
            ),
        ] {
            view.mapped = older;
            assert!(waits(&view, Mode::Dra));
            let told = plan(&view, Mode::Dra).to_string();
            assert!(told.contains(words), "{told}");
            let told = plan(&view, Mode::Both).to_string();
            assert!(!told.contains("but not while"), "{told}");
        }
        view.mapped = Mapped::By(class);
        assert!(!waits(&view, Mode::Dra));
        assert!(waits(&view, Mode::Drained));
        let said = |to| plan(&view, to).next.join("\n");
        let dra = said(Mode::Dra);
        for words in [
            "DeviceClass gpu.nvidia.com (the newest that has the name, before old)",
            "on every node whose count is 0",
            "gpu.nvidia.com.deviceclass.resource.k8s.io/devices counts them",
            "requests.nvidia.com/gpu counts those of DeviceClass gpu.nvidia.com too",
        ] {
            assert!(dra.contains(words), "{words:?} is not in {dra}");
        }
        let both = said(Mode::Both);
        assert!(
            both.contains("but not while the count of this node is 0"),
            "{both}"
        );
        assert!(!said(Mode::Legacy).contains("but not while"));
    }

    #[test]
    fn a_plan_says_what_autoscaler_and_taints_mean_for_the_pods_that_come_next() {
        let mut view = view_of_page(&page());
        view.marks = Marks {
            expects_count: Some("k8s.amazonaws.com/accelerator"),
            taints: vec!["nvidia.com/gpu=present:NoSchedule".to_owned()],
        };
        let unready = "label k8s.amazonaws.com/accelerator cluster-autoscaler takes the node for an unready one";
        let unused = "claims do not keep it from being scaled down";
        let tolerate = "have to tolerate nvidia.com/gpu=present:NoSchedule themselves";
        for (to, expected) in [
            (Mode::Legacy, [false, false, false]),
            (Mode::Both, [false, true, true]),
            (Mode::Dra, [true, true, true]),
            (Mode::Drained, [true, false, false]),
        ] {
            let said = plan(&view, to).next.join("\n");
            let found = [unready, unused, tolerate].map(|words| said.contains(words));
            assert_eq!(found, expected, "{said}");
        }
    }
}
