//! What the kubelet was told, and what follows from that for who may and who must hold what.

use std::collections::{BTreeMap, BTreeSet};

/// A pod that is there, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) of: Of,
    pub(super) told: Told,
}

/// What it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Of {
    Counted,
    /// A claim of the pod's name, allocated to this unit.
    Claim(String),
}

/// What the kubelet knows about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    /// Nothing yet: the call is on its way, with these ids as far as it is known.
    Asking(BTreeSet<String>),
    /// The answer granted these ids and these units. A claim has no ids.
    Granted {
        ids: BTreeSet<String>,
        units: BTreeSet<String>,
    },
    /// It is being ended, and whether it has been is not known yet.
    Ending,
}

/// A hold as the ledger has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hold {
    pub(super) unit: String,
    pub(super) phase: String,
    /// `-` for a claim.
    pub(super) id: String,
    /// The name of pod or claim; `-` if it is not known yet.
    pub(super) holder: String,
}

/// What is wrong with the holds, in words.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) lost: Vec<String>,
    pub(super) invented: Vec<String>,
    pub(super) doubled: Vec<String>,
    /// CDI specs that are there without a claim.
    pub(super) files: Vec<String>,
}

impl Wrong {
    pub(super) fn is_none(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn add(&mut self, other: Self) {
        self.lost.extend(other.lost);
        self.invented.extend(other.invented);
        self.doubled.extend(other.doubled);
        self.files.extend(other.files);
    }
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Book {
    pub(super) pods: BTreeMap<String, Pod>,
    /// Ids whose hold may still be there: nobody knows whether they were given out, or their pod has ended and the
    /// daemon may not have seen it yet.
    left: BTreeSet<String>,
    /// Claims that have ended and may still be allocated as far as the daemon knows.
    left_claims: BTreeSet<String>,
}

impl Book {
    /// Pods of a kind that have what they asked for.
    pub(super) fn granted(&self, is_kind: impl Fn(&Of) -> bool) -> Vec<String> {
        let pods = self.pods.iter();
        let granted = pods
            .filter(|(_, pod)| is_kind(&pod.of) && matches!(pod.told, Told::Granted { .. }))
            .map(|(name, _)| name.clone());
        granted.collect()
    }

    /// A call is made for a new pod.
    pub(super) fn ask(&mut self, name: &str, of: Of) {
        let told = Told::Asking(BTreeSet::new());
        self.pods.insert(name.to_owned(), Pod { of, told });
    }

    /// Something is known about a pod.
    pub(super) fn tell(&mut self, name: &str, told: Told) {
        let pod = self.pods.get_mut(name).expect("the book has the pod");
        pod.told = told;
    }

    /// A pod is gone, and these ids may be left of it.
    pub(super) fn gone(&mut self, name: &str, ids: impl IntoIterator<Item = String>) {
        let pod = self.pods.remove(name).expect("the book has the pod");
        self.left.extend(ids);
        match pod.of {
            Of::Counted => {
                if let Told::Granted { ids, .. } | Told::Asking(ids) = pod.told {
                    self.left.extend(ids);
                }
            }
            Of::Claim(_) => {
                self.left_claims.insert(name.to_owned());
            }
        }
    }

    /// Judges the holds of a moment in which no call is on its way.
    pub(super) fn judge(&self, holds: &[Hold]) -> Wrong {
        let mut wrong = Wrong::default();
        for (name, pod) in &self.pods {
            wrong.lost.extend(lost(name, pod, holds));
        }
        let invented = holds.iter().filter(|hold| !self.explains(hold));
        wrong.invented.extend(invented.map(|it| format!("{it:?}")));
        let mut seen = BTreeSet::new();
        let doubled = holds.iter().filter(|hold| !seen.insert(&hold.unit));
        wrong.doubled.extend(doubled.map(|it| format!("{it:?}")));
        wrong
    }

    /// Forgets what may have been left, and is no more: it must not come back.
    pub(super) fn forget_all_but(&mut self, holds: &[Hold]) {
        self.left
            .retain(|id| holds.iter().any(|hold| hold.id == *id));
        self.left_claims
            .retain(|claim| holds.iter().any(|hold| hold.holder == *claim));
    }

    fn explains(&self, hold: &Hold) -> bool {
        match hold.phase.as_str() {
            "Granted" | "Bound" => {
                self.left.contains(&hold.id)
                    || self.pods.iter().any(|(name, pod)| {
                        let has = match &pod.told {
                            Told::Asking(ids) => ids.contains(&hold.id),
                            Told::Granted { ids, units } => {
                                ids.contains(&hold.id) && units.contains(&hold.unit)
                            }
                            Told::Ending => true,
                        };
                        pod.of == Of::Counted && has && hold.is_of(name)
                    })
            }
            // The API shows the allocation as long as the claim is there.
            "Reserved" => self.left_claims.contains(&hold.holder) || self.claim_of(hold).is_some(),
            "Prepared" => self.claim_of(hold).is_some(),
            _ => false,
        }
    }

    fn claim_of(&self, hold: &Hold) -> Option<&Pod> {
        let mut pods = self.pods.iter();
        let found = pods
            .find(|(name, pod)| pod.of == Of::Claim(hold.unit.clone()) && **name == hold.holder);
        found.map(|(_, pod)| pod)
    }
}

impl Hold {
    fn is_of(&self, pod: &str) -> bool {
        self.phase == "Granted" || self.holder == pod
    }
}

/// What a pod was told that it has, and has not.
fn lost(name: &str, pod: &Pod, holds: &[Hold]) -> Vec<String> {
    let Told::Granted { ids, units } = &pod.told else {
        return Vec::new();
    };
    let has = |unit: &str| match &pod.of {
        Of::Counted => holds.iter().any(|hold| {
            let phase = ["Granted", "Bound"].contains(&hold.phase.as_str());
            phase && hold.unit == unit && ids.contains(&hold.id) && hold.is_of(name)
        }),
        Of::Claim(_) => holds
            .iter()
            .any(|hold| hold.phase == "Prepared" && hold.unit == unit && hold.holder == name),
    };
    let lost = units.iter().filter(|unit| !has(unit));
    lost.map(|unit| format!("{name} was told that it has {unit}, and has not"))
        .collect()
}
