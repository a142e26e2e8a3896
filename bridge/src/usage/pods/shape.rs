//! What a pod may own, whichever source shows it.

use std::collections::BTreeSet;

use bridge_core::{BoundPod, ClaimName, PodName, PodPhase, PodUid};

/// A quantity that can't be read counts as this: the pod asks for something.
const UNREADABLE: u32 = 1;
/// No container has more GPUs than this; it keeps sums of nonsense small.
const COUNT_LIMIT: u32 = 1024;

/// Annotation of a static pod's mirror in the API: the static pod's own UID, which cgroups and the kubelet's
/// checkpoints have (kubernetes v1.37.2, `pkg/kubelet/pod/mirror_client.go`, `pkg/kubelet/config/common.go`).
pub(super) const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
/// `restartPolicy` of an init container that runs beside the app containers.
pub(super) const SIDECAR_POLICY: &str = "Always";

/// What counts of a pod.
#[derive(Debug, Default)]
pub(super) struct Shape<'a> {
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    /// The one that cgroups have.
    pub(super) uid: &'a str,
    /// `status.phase`.
    pub(super) phase: &'a str,
    pub(super) containers: Vec<Asking<'a>>,
    pub(super) started: bool,
    /// Names of the claims that it uses, as far as they exist.
    pub(super) claims: BTreeSet<String>,
}

/// A pod as a source shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::usage) struct Shown {
    pub(in crate::usage) bound: BoundPod,
    pub(in crate::usage) claims: BTreeSet<ClaimName>,
}

/// A container, and its limit of our resource where it has one and no claim serves it.
#[derive(Debug)]
pub(super) struct Asking<'a> {
    pub(super) role: Role,
    pub(super) limit: Option<&'a str>,
}

/// What part a container has in its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Init,
    Sidecar,
    App,
}

impl Shape<'_> {
    /// `None`: it has no usable UID, so it is no pod of a kubelet.
    pub(super) fn shown(&self) -> Option<Shown> {
        let named = |name: &String| ClaimName {
            namespace: self.namespace.to_owned(),
            name: name.clone(),
        };
        Some(Shown {
            bound: self.bound()?,
            claims: self.claims.iter().map(named).collect(),
        })
    }

    fn bound(&self) -> Option<BoundPod> {
        Some(BoundPod {
            pod: PodName {
                namespace: self.namespace.to_owned(),
                name: self.name.to_owned(),
            },
            uid: PodUid::new(self.uid).ok()?,
            phase: match self.phase {
                "Succeeded" | "Failed" => PodPhase::Terminal,
                _ => PodPhase::Live,
            },
            may_own: self.may_own(),
            started: self.started,
        })
    }

    /// Containers may take over what init containers had, so of both the larger counts; sidecars keep theirs.
    fn may_own(&self) -> u32 {
        let of = |role: Role| {
            self.containers
                .iter()
                .filter(move |asking| asking.role == role)
                .map(|asking| asking.limit.map_or(0, count))
        };
        let apps = of(Role::App).fold(0, u32::saturating_add);
        let init = of(Role::Init).max().unwrap_or(0);
        of(Role::Sidecar).fold(apps.max(init), u32::saturating_add)
    }
}

/// An extended resource is a whole number; the API server writes 1000 as `1k`.
fn count(quantity: &str) -> u32 {
    let (digits, factor) = match quantity.strip_suffix('k') {
        Some(digits) => (digits, 1000),
        None => (quantity, 1),
    };
    digits
        .parse::<u32>()
        .unwrap_or(UNREADABLE)
        .saturating_mul(factor)
        .min(COUNT_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(containers: &[(Role, &str)]) -> u32 {
        let shape = Shape {
            uid: "u",
            containers: containers
                .iter()
                .map(|(role, limit)| Asking {
                    role: *role,
                    limit: (!limit.is_empty()).then_some(limit),
                })
                .collect(),
            ..Shape::default()
        };
        shape.bound().unwrap().may_own
    }

    #[test]
    fn a_pod_may_own_the_larger_of_its_init_and_app_containers_and_its_sidecars() {
        use Role::{App, Init, Sidecar};
        for (containers, want) in [
            (vec![], 0),
            (vec![(App, "")], 0),
            (vec![(App, "2"), (App, "1")], 3),
            (vec![(Init, "4"), (Init, "1"), (App, "2")], 4),
            (vec![(Init, "1"), (Sidecar, "1"), (App, "2")], 3),
            (vec![(Init, "4"), (Sidecar, "1"), (App, "2")], 5),
            (vec![(App, "0")], 0),
            (vec![(App, "x")], 1),
            (vec![(App, "99999999999"), (Init, "5M")], 1),
            (vec![(App, "9k"), (Sidecar, "4000000000")], 2048),
        ] {
            assert_eq!(owned(&containers), want, "{containers:?}");
        }
    }

    #[test]
    fn only_the_two_final_phases_are_terminal() {
        for (phase, want) in [
            ("Pending", PodPhase::Live),
            ("Running", PodPhase::Live),
            ("Unknown", PodPhase::Live),
            ("", PodPhase::Live),
            ("Succeeded", PodPhase::Terminal),
            ("Failed", PodPhase::Terminal),
        ] {
            let shape = Shape {
                uid: "u",
                phase,
                ..Shape::default()
            };
            assert_eq!(shape.bound().unwrap().phase, want, "{phase}");
        }
    }

    #[test]
    fn a_pod_without_a_usable_uid_is_none() {
        assert_eq!(Shape::default().bound(), None);
    }
}
