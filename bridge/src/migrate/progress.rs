//! How far a change of mode is on one node, by what the API shows.

use bridge_core::{Face, Mode};

use super::plan::{Holder, closed_out};

/// What the API shows of what a node offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shown {
    /// `status.allocatable` of the Node.
    pub(super) count: u32,
    /// Devices in the slice; `None`: there is no slice.
    pub(super) devices: Option<usize>,
    /// Of them those that a claim can get, or has.
    pub(super) open: usize,
    /// Devices that claims have.
    pub(super) claimed: usize,
}

/// How far the change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stage {
    /// The node still offers what the mode closes, or not yet what it opens.
    NotInForce,
    /// It offers what it should, and these have to end before the change is complete.
    Waits(Vec<Holder>),
    /// It is complete.
    Complete,
}

/// How far the change to a mode is.
pub(super) fn stage(holders: &[Holder], shown: Shown, to: Mode) -> Stage {
    let counted = if to.opens(Face::Legacy) {
        shown.count > 0 || shown.devices.is_some_and(|all| all == shown.claimed)
    } else {
        shown.count == 0
    };
    let claims = if to.opens(Face::Dra) {
        shown.devices.is_some()
    } else {
        shown.open <= shown.claimed
    };
    if !(counted && claims) {
        return Stage::NotInForce;
    }
    let first = closed_out(holders, to);
    if first.is_empty() {
        Stage::Complete
    } else {
        Stage::Waits(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holders(kinds: &[&'static str]) -> Vec<Holder> {
        let holder = |kind: &&'static str| Holder {
            kind,
            namespace: "train".to_owned(),
            name: "a".to_owned(),
            gpus: 1,
            pods: Vec::new(),
        };
        kinds.iter().map(holder).collect()
    }

    fn shown(count: u32, devices: Option<usize>, open: usize, claimed: usize) -> Shown {
        Shown {
            count,
            devices,
            open,
            claimed,
        }
    }

    #[test]
    fn a_mode_is_in_force_when_both_schedulers_see_it() {
        for (to, seen, expected) in [
            (Mode::Dra, shown(8, Some(8), 8, 0), false),
            (Mode::Dra, shown(0, Some(8), 8, 0), true),
            (Mode::Dra, shown(0, None, 0, 0), false),
            (Mode::Legacy, shown(8, Some(8), 8, 0), false),
            (Mode::Legacy, shown(7, Some(8), 1, 1), true),
            (Mode::Legacy, shown(8, None, 0, 0), true),
            (Mode::Legacy, shown(0, None, 0, 0), false),
            (Mode::Both, shown(8, None, 0, 0), false),
            (Mode::Both, shown(8, Some(8), 8, 0), true),
            (Mode::Both, shown(0, Some(8), 8, 8), true),
            (Mode::Both, shown(0, Some(8), 8, 7), false),
            (Mode::Drained, shown(0, Some(8), 2, 2), true),
            (Mode::Drained, shown(0, None, 0, 0), true),
            (Mode::Drained, shown(1, None, 0, 0), false),
        ] {
            let is = stage(&[], seen, to) == Stage::Complete;
            assert_eq!(is, expected, "{to:?} {seen:?}");
        }
    }

    #[test]
    fn a_mode_waits_for_those_whom_it_closes_out() {
        let names = |kinds: &[&'static str], to, seen| match stage(&holders(kinds), seen, to) {
            Stage::Waits(first) => first.iter().map(|it| it.kind).collect(),
            Stage::NotInForce | Stage::Complete => Vec::new(),
        };
        let all = ["pod", "claim"];
        assert_eq!(names(&all, Mode::Dra, shown(0, Some(8), 8, 1)), ["pod"]);
        assert_eq!(
            names(&all, Mode::Legacy, shown(7, Some(8), 1, 1)),
            ["claim"]
        );
        assert_eq!(names(&all, Mode::Drained, shown(0, Some(8), 1, 1)), all);
        assert!(names(&all, Mode::Both, shown(7, Some(8), 8, 1)).is_empty());
    }
}
