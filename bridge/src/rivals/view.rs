//! The kubelet's list of our resource, against the one that we sent.
//!
//! The kubelet keeps one list for a resource, the last that any plugin of it sent (kubernetes v1.37.2,
//! `pkg/kubelet/cm/devicemanager/manager.go`, `genericDeviceUpdateCallback`).

use std::collections::BTreeSet;

use bridge_core::{Health, Offers};

/// A difference must be seen this many times in a row, with our list the same all the while: the kubelet takes some
/// milliseconds to read it.
const TIMES: u32 = 3;

/// What a look has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing yet: the lists differ, and did not for long enough.
    Open,
    /// The kubelet counts what we list.
    Agrees,
    /// It does not count these of ours.
    Lacks(Vec<String>),
    /// It counts these, which we do not list as healthy.
    Foreign(Vec<String>),
}

/// What was seen in a row.
#[derive(Debug, Default)]
pub(super) struct View {
    listed: BTreeSet<String>,
    counted: BTreeSet<String>,
    times: u32,
}

impl View {
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    pub(super) fn judge(&mut self, offers: &Offers, counted: &BTreeSet<String>) -> Verdict {
        let healthy = offers
            .counted
            .iter()
            .filter(|offer| offer.health == Health::Healthy);
        let listed: BTreeSet<String> = healthy.map(|offer| offer.id.to_string()).collect();
        if listed == *counted {
            self.reset();
            return Verdict::Agrees;
        }
        if listed != self.listed || *counted != self.counted {
            self.listed = listed;
            self.counted.clone_from(counted);
            self.times = 0;
        }
        self.times += 1;
        if self.times < TIMES {
            return Verdict::Open;
        }
        let foreign: Vec<String> = self.counted.difference(&self.listed).cloned().collect();
        if foreign.is_empty() {
            return Verdict::Lacks(self.listed.difference(&self.counted).cloned().collect());
        }
        Verdict::Foreign(foreign)
    }
}

#[cfg(test)]
mod tests {
    use bridge_core::{CountedOffer, DeviceId, UnitId};

    use super::*;

    fn offers(healthy: &[&str], unhealthy: &[&str]) -> Offers {
        let offer = |id: &&str, health| {
            let unit = UnitId::new(*id).unwrap();
            CountedOffer {
                id: DeviceId::of_unit(unit.clone()),
                unit,
                health,
                numa_node: None,
                free: health == Health::Healthy,
                leaving: false,
                reserved: false,
            }
        };
        let healthy = healthy.iter().map(|id| offer(id, Health::Healthy));
        let unhealthy = unhealthy.iter().map(|id| offer(id, Health::Unhealthy));
        Offers {
            counted: healthy.chain(unhealthy).collect(),
            ..Offers::default()
        }
    }

    fn ids(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn a_list_from_elsewhere_is_told_once_it_stays() {
        let ours = offers(&["GPU-0"], &["GPU-1"]);
        let mut view = View::default();
        assert_eq!(view.judge(&ours, &ids(&["GPU-0"])), Verdict::Agrees);
        for (counted, foreign) in [
            (&["GPU-0", "GPU-1"][..], "GPU-1"),
            (&["GPU-0::0", "GPU-0"][..], "GPU-0::0"),
        ] {
            assert_eq!(view.judge(&ours, &ids(counted)), Verdict::Open);
            assert_eq!(view.judge(&ours, &ids(counted)), Verdict::Open);
            let verdict = Verdict::Foreign(vec![foreign.to_owned()]);
            assert_eq!(view.judge(&ours, &ids(counted)), verdict);
        }
    }

    #[test]
    fn a_kubelet_that_counts_too_few_is_told_once_it_stays() {
        let ours = offers(&["GPU-0", "GPU-1"], &[]);
        let mut view = View::default();
        for _ in 1..TIMES {
            assert_eq!(view.judge(&ours, &ids(&["GPU-1"])), Verdict::Open);
        }
        let verdict = Verdict::Lacks(vec!["GPU-0".to_owned()]);
        assert_eq!(view.judge(&ours, &ids(&["GPU-1"])), verdict);
    }

    #[test]
    fn lists_that_change_meanwhile_prove_nothing() {
        let mut view = View::default();
        for round in 0..5 {
            let ours = if round % 2 == 0 {
                offers(&["GPU-0"], &["GPU-1"])
            } else {
                offers(&["GPU-1"], &["GPU-0"])
            };
            assert_eq!(view.judge(&ours, &ids(&["GPU-0", "GPU-1"])), Verdict::Open);
        }
    }
}
