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
}

impl ConditionName {
    /// Every condition, in the order of the pages.
    pub const ALL: [Self; 9] = [
        Self::LedgerServing,
        Self::OnlyRegistrant,
        Self::NvmlAnswering,
        Self::DevicePluginRegistered,
        Self::DraPluginRegistered,
        Self::ApiServerReachable,
        Self::SlicePublished,
        Self::NodeCountTended,
        Self::DemandTended,
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
        }
    }
}

/// How a condition stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// Whether it is met.
    pub ok: bool,
    /// When `ok` last changed; wall clock, for people.
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
                ok: false,
                since,
                message: "nothing has been heard since the start".to_owned(),
            };
            (name, condition)
        };
        let all = ConditionName::ALL.into_iter().map(unheard).collect();
        Self(Arc::new(watch::Sender::new(all)))
    }

    /// Says how a condition stands. Cheap and silent when it stands so already, so that a loop may say it on
    /// every round; a change of `ok` is logged.
    pub fn set(&self, name: ConditionName, ok: bool, message: impl Into<String>) {
        let message = message.into();
        self.0.send_if_modified(|all| {
            let before = all.get(&name);
            if before.is_some_and(|before| before.ok == ok && before.message == message) {
                return false;
            }
            let flipped = before.is_none_or(|before| before.ok != ok);
            let since = match before {
                Some(before) if !flipped => before.since,
                Some(_) | None => SystemTime::now(),
            };
            if flipped {
                tracing::info!(condition = name.as_str(), ok, message, "Condition changed");
            }
            all.insert(name, Condition { ok, since, message });
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
        assert!(all.values().all(|condition| !condition.ok));
    }

    #[test]
    fn since_is_kept_until_the_condition_flips() {
        let conditions = Conditions::new();
        let name = ConditionName::NvmlAnswering;
        let start = conditions.snapshot()[&name].since;
        conditions.set(name, false, "no library");
        assert_eq!(conditions.snapshot()[&name].since, start);
        conditions.set(name, true, "8 GPUs");
        assert!(conditions.snapshot()[&name].since > start);
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
