//! The taint of a device in the ResourceSlice: what it says, what it does, and who tolerates it.

use std::time::Duration;

/// Key of the taint on devices that no new claim may get; its value is [`TaintReason::as_str`].
pub const TAINT_KEY: &str = "gpu-bridge.dev/unit";

/// Why a device in the slice is tainted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaintReason {
    /// It is on the side of counted pods, free or held by one.
    Counted,
    /// A process of no known holder, or of a former one, runs on it.
    Foreign,
    /// The GPU does not answer.
    Lost,
    /// The driver told of an error by which the GPU is closed.
    Faulty,
    /// The claim that has it prepared is deallocated, or nobody uses it any more.
    Unpreparing,
    /// The mode or a limit closes the face, or the daemon gives nothing out now.
    Closed,
}

impl TaintReason {
    /// The value of the taint.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counted => "Counted",
            Self::Foreign => "Foreign",
            Self::Lost => "Lost",
            Self::Faulty => "Faulty",
            Self::Unpreparing => "Unpreparing",
            Self::Closed => "Closed",
        }
    }
}

/// What a taint does (`DeviceTaintEffect` in k8s.io/api `resource/v1/types.go`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaintEffect {
    /// No new claim gets the device.
    NoSchedule,
    /// And the pods of claims that have it are evicted.
    NoExecute,
}

impl TaintEffect {
    /// The word in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// The taint of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Taint {
    /// Why.
    pub reason: TaintReason,
    /// What it does.
    pub effect: TaintEffect,
}

impl Taint {
    /// A taint that keeps new claims away, and touches nobody.
    #[must_use]
    pub fn keeping_out(reason: TaintReason) -> Self {
        Self {
            reason,
            effect: TaintEffect::NoSchedule,
        }
    }

    /// A taint that evicts.
    #[must_use]
    pub fn evicting(reason: TaintReason) -> Self {
        Self {
            reason,
            effect: TaintEffect::NoExecute,
        }
    }
}

/// A toleration in an allocation result (`DeviceToleration` in k8s.io/api `resource/v1/types.go`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Toleration {
    /// The key tolerated; `None`: every key.
    pub key: Option<String>,
    /// The value tolerated; `None`: every value.
    pub value: Option<String>,
    /// The effect tolerated; `None`: every effect.
    pub effect: Option<TaintEffect>,
    /// For how long from when the taint was added; `None`: for ever.
    pub lasts: Option<Duration>,
}

impl Toleration {
    /// Whether whoever wrote it asked to stay for at least this long on a device with the taint.
    #[must_use]
    pub fn asks_to_stay(&self, taint: Taint, at_least: Duration) -> bool {
        self.is_for(taint) && self.lasts.is_none_or(|lasts| lasts >= at_least)
    }

    /// Whether the eviction controller is certain to leave a claim with it alone. That is more than to match: the
    /// controller passes over tolerations of `NoExecute` that name no effect (kubernetes v1.37.2,
    /// `pkg/controller/devicetainteviction`, `claimEvictionTime`), and a limited time counts by clocks of others.
    #[must_use]
    pub fn surely_spares(&self, taint: Taint) -> bool {
        self.is_for(taint) && self.effect.is_some() && self.lasts.is_none()
    }

    fn is_for(&self, taint: Taint) -> bool {
        let key = self.key.as_deref().is_none_or(|key| key == TAINT_KEY);
        let value = self.value.as_deref();
        key && value.is_none_or(|value| value == taint.reason.as_str())
            && self.effect.is_none_or(|effect| effect == taint.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Tolerates every taint of our key for ever, effect by effect.
    fn toleration(effect: Option<TaintEffect>) -> Toleration {
        Toleration {
            key: Some(TAINT_KEY.to_owned()),
            value: None,
            effect,
            lasts: None,
        }
    }

    fn check(toleration: &Toleration, asks_to_stay: bool, surely_spares: bool) {
        let taint = Taint::evicting(TaintReason::Counted);
        assert_eq!(
            (
                toleration.asks_to_stay(taint, LONG),
                toleration.surely_spares(taint)
            ),
            (asks_to_stay, surely_spares),
            "{toleration:?}"
        );
    }

    #[test]
    fn a_toleration_of_the_effect_stays_and_is_spared() {
        check(&toleration(Some(TaintEffect::NoExecute)), true, true);
        check(&toleration(Some(TaintEffect::NoSchedule)), false, false);
    }

    #[test]
    fn a_toleration_without_an_effect_asks_to_stay_and_is_not_spared() {
        check(&toleration(None), true, false);
    }

    #[test]
    fn key_and_value_are_compared_where_they_are_named() {
        let spares = toleration(Some(TaintEffect::NoExecute));
        let named = |key: Option<&str>, value: Option<&str>| Toleration {
            key: key.map(str::to_owned),
            value: value.map(str::to_owned),
            ..spares.clone()
        };
        check(&named(None, None), true, true);
        check(&named(None, Some("Counted")), true, true);
        check(&named(Some(TAINT_KEY), Some("Counted")), true, true);
        check(&named(Some(TAINT_KEY), Some("Foreign")), false, false);
        check(&named(Some("example.com/unit"), None), false, false);
    }

    #[test]
    fn a_limited_time_spares_nobody_for_certain() {
        let lasting = |lasts| Toleration {
            lasts: Some(lasts),
            ..toleration(Some(TaintEffect::NoExecute))
        };
        check(&lasting(LONG), true, false);
        check(&lasting(LONG - Duration::from_secs(1)), false, false);
    }
}
