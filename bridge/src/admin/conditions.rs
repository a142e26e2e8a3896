//! What must be so before the node serves both faces, and whether it is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

/// A thing that must be so before the daemon is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionName {
    /// The ledger was read or adopted, and the pool gives units out.
    LedgerServing,
    /// No other daemon serves our resource or our driver on this node.
    OnlyRegistrant,
    /// The NVML library is loaded and answers.
    NvmlAnswering,
    /// The kubelet knows the device plugin and listens to its list.
    DevicePluginRegistered,
    /// The kubelet knows the DRA plugin.
    DraPluginRegistered,
    /// The API server answers, and the watches are in sync.
    ApiServerReachable,
    /// The ResourceSlice in the API is the one that the pool wants.
    SlicePublished,
    /// The count in the own Node is kept, or it is known why not: then free units stay on their side, and both
    /// faces serve.
    NodeCountTended,
    /// It is known whether free units move by the pods that wait or by turns, and why.
    DemandTended,
    /// The configuration file as it is now is in force; else the last good one is.
    ConfigInForce,
    /// No DeviceClass makes claims of counted pods while this node serves both kinds.
    CountsStayCounts,
}

impl ConditionName {
    /// Every condition, in the order of the pages.
    pub const ALL: [Self; 11] = [
        Self::LedgerServing,
        Self::OnlyRegistrant,
        Self::NvmlAnswering,
        Self::DevicePluginRegistered,
        Self::DraPluginRegistered,
        Self::ApiServerReachable,
        Self::SlicePublished,
        Self::NodeCountTended,
        Self::DemandTended,
        Self::ConfigInForce,
        Self::CountsStayCounts,
    ];

    /// The word on the pages and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LedgerServing => "LedgerServing",
            Self::OnlyRegistrant => "OnlyRegistrant",
            Self::NvmlAnswering => "NvmlAnswering",
            Self::DevicePluginRegistered => "DevicePluginRegistered",
            Self::DraPluginRegistered => "DraPluginRegistered",
            Self::ApiServerReachable => "ApiServerReachable",
            Self::SlicePublished => "SlicePublished",
            Self::NodeCountTended => "NodeCountTended",
            Self::DemandTended => "DemandTended",
            Self::ConfigInForce => "ConfigInForce",
            Self::CountsStayCounts => "CountsStayCounts",
        }
    }
}

/// How far a condition is met. A `bool` is one of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// As it should be.
    Fully,
    /// The node serves, and can't do all that it could. The reason, where it has a page in `migration-guide/reasons`.
    Partly(Option<&'static str>),
    /// It is not met. The reason, where it has a page.
    Not(Option<&'static str>),
}

impl From<bool> for Met {
    fn from(ok: bool) -> Self {
        if ok { Self::Fully } else { Self::Not(None) }
    }
}

impl Met {
    /// Whether the daemon may be called ready.
    #[must_use]
    pub fn is_ok(self) -> bool {
        match self {
            Self::Fully | Self::Partly(_) => true,
            Self::Not(_) => false,
        }
    }

    /// Whether the node serves less than it could.
    #[must_use]
    pub fn is_limiting(self) -> bool {
        match self {
            Self::Fully => false,
            Self::Partly(_) | Self::Not(_) => true,
        }
    }

    /// The word in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fully => "met",
            Self::Partly(_) => "limited",
            Self::Not(_) => "unmet",
        }
    }

    /// The reason that has a page.
    #[must_use]
    pub fn reason(self) -> Option<&'static str> {
        match self {
            Self::Fully => None,
            Self::Partly(reason) | Self::Not(reason) => reason,
        }
    }
}

/// How a condition stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// How far it is met.
    pub met: Met,
    /// When `met` last changed; wall clock, for people.
    pub since: SystemTime,
    /// Why it stands so, and what to do if it is not met.
    pub message: String,
}

/// All conditions of the daemon. A clone is another way to the same ones.
#[derive(Debug, Clone)]
pub struct Conditions(Arc<watch::Sender<BTreeMap<ConditionName, Condition>>>);

impl Default for Conditions {
    fn default() -> Self {
        Self::new()
    }
}

impl Conditions {
    /// None met yet: what nobody has reported on is not so.
    #[must_use]
    pub fn new() -> Self {
        let since = SystemTime::now();
        let unheard = |name| {
            let condition = Condition {
                met: Met::Not(None),
                since,
                message: "nothing has been heard since the start".to_owned(),
            };
            (name, condition)
        };
        let all = ConditionName::ALL.into_iter().map(unheard).collect();
        Self(Arc::new(watch::Sender::new(all)))
    }

    /// Says how a condition stands. Cheap and silent when it stands so already, so that a loop may say it on
    /// every round; a change of `met` is logged.
    pub fn set(&self, name: ConditionName, met: impl Into<Met>, message: impl Into<String>) {
        let (met, message) = (met.into(), message.into());
        self.0.send_if_modified(|all| {
            let before = all.get(&name);
            if before.is_some_and(|before| before.met == met && before.message == message) {
                return false;
            }
            let flipped = before.is_none_or(|before| before.met != met);
            let since = match before {
                Some(before) if !flipped => before.since,
                Some(_) | None => SystemTime::now(),
            };
            if flipped {
                let (ok, limits) = (met.is_ok(), met.is_limiting());
                tracing::info!(
                    condition = name.as_str(),
                    ok,
                    limits,
                    message,
                    "Condition changed"
                );
            }
            let condition = Condition {
                met,
                since,
                message,
            };
            all.insert(name, condition);
            true
        });
    }

    /// How every condition stands now.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<ConditionName, Condition> {
        self.0.borrow().clone()
    }

    /// Wakes when a condition changes.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<BTreeMap<ConditionName, Condition>> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reported_on_is_not_met() {
        let all = Conditions::new().snapshot();
        assert_eq!(all.len(), ConditionName::ALL.len());
        assert!(all.values().all(|condition| !condition.met.is_ok()));
    }

    #[test]
    fn since_is_kept_until_the_condition_flips() {
        let conditions = Conditions::new();
        let name = ConditionName::NvmlAnswering;
        let start = conditions.snapshot()[&name].since;
        conditions.set(name, false, "no library");
        assert_eq!(conditions.snapshot()[&name].since, start);
        conditions.set(name, true, "8 GPUs");
        let met = conditions.snapshot()[&name].since;
        assert!(met > start);
        conditions.set(name, Met::Partly(None), "7 GPUs, one is silent");
        assert!(conditions.snapshot()[&name].since > met);
    }

    #[test]
    fn saying_the_same_again_wakes_nobody() {
        let conditions = Conditions::new();
        conditions.set(ConditionName::SlicePublished, true, "1 slice");
        let mut seen = conditions.subscribe();
        seen.mark_unchanged();
        conditions.set(ConditionName::SlicePublished, true, "1 slice");
        assert!(!seen.has_changed().unwrap());
        conditions.set(ConditionName::SlicePublished, true, "2 slices");
        assert!(seen.has_changed().unwrap());
    }
}
