//! The times in which the kubelet had no list of counted GPUs, because it or who serves the node was struck, and which
//! counted pods fell into them.
//!
//! Nobody can serve a counted pod that the kubelet admits in such a time: it fails it by itself. Whoever fails at
//! another time was failed by us. When a gap ends is taken from the kubelet's own log, so it means the same whoever
//! serves the node. A kubelet that has just started also fails pods by what its book of before says, as long as it has
//! not heard which pods there still are, so a gap after its own end lasts until then (kubernetes v1.37.2,
//! `UpdateAllocatedDevices` in `pkg/kubelet/cm/devicemanager`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::audit::Clock;
use super::life::{Life, Lives};
use super::load::Kind;

/// Who was struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Struck {
    /// The daemon, or both stand-ins.
    Daemon,
    Kubelet,
    /// Nobody: the daemon's next pod follows, and the kubelet has a list all the time.
    Nobody,
}

/// When somebody was struck: a moment before.
#[derive(Debug, Clone, Copy)]
pub struct Strike {
    pub at: Duration,
    pub whom: Struck,
}

/// One time without a list.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Gap {
    pub struck: Struck,
    /// Since the first pod of the run.
    pub after_s: f64,
    /// From the blow until the kubelet had read a list again, and after its own start had heard of its pods.
    pub seconds: f64,
    /// Counted pods that were bound, and neither ran nor had ended, at some moment of it.
    pub on_their_way: usize,
    /// Those of them that failed.
    pub failed: Vec<String>,
}

/// All gaps of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct Gaps {
    pub all: Vec<Gap>,
    /// Counted pods that failed at another time.
    pub failed_outside: Vec<String>,
}

impl Gaps {
    /// Those of a run that lasted from one time to another.
    pub fn of(
        lives: &Lives,
        strikes: &[Strike],
        kubelet: &Kubelet,
        (began, ended): (Duration, Duration),
    ) -> Self {
        let counted: Vec<_> = lives
            .iter()
            .filter(|(_, life)| life.kind == Kind::Counted)
            .filter_map(|(name, life)| Some((name, life, kubelet.way_of(name, life)?)))
            .collect();
        let mut outside: Vec<String> = lives
            .iter()
            .filter(|(_, life)| life.kind == Kind::Counted && life.failed.is_some())
            .map(|(name, _)| name.clone())
            .collect();
        let is_gap = |strike: &&Strike| strike.whom != Struck::Nobody;
        let mut all = Vec::new();
        for strike in strikes.iter().filter(is_gap) {
            let end = kubelet.serves_after(strike).unwrap_or(ended);
            let fell_in = |(from, to): &(Duration, Duration)| *to >= strike.at && *from <= end;
            let on_their_way: Vec<_> = counted.iter().filter(|(_, _, way)| fell_in(way)).collect();
            let failed: Vec<String> = on_their_way
                .iter()
                .map(|(name, ..)| (*name).clone())
                .filter(|name| outside.contains(name))
                .collect();
            outside.retain(|name| !failed.contains(name));
            all.push(Gap {
                struck: strike.whom,
                after_s: strike.at.saturating_sub(began).as_secs_f64(),
                seconds: end.saturating_sub(strike.at).as_secs_f64(),
                on_their_way: on_their_way.len(),
                failed,
            });
        }
        Self {
            all,
            failed_outside: outside,
        }
    }

    /// Counted pods that failed in a gap.
    pub fn failed(&self) -> usize {
        self.all.iter().map(|gap| gap.failed.len()).sum()
    }

    /// Counted pods that came in a gap. One that waited over two of them counts in both.
    pub fn on_their_way(&self) -> usize {
        self.all.iter().map(|gap| gap.on_their_way).sum()
    }

    /// The longest, in seconds.
    pub fn longest_s(&self) -> f64 {
        self.all.iter().map(|gap| gap.seconds).fold(0.0, f64::max)
    }

    /// For the end of a sentence; nothing where there was none.
    pub fn summed_up(&self) -> String {
        if self.all.is_empty() {
            return String::new();
        }
        format!(
            "; the kubelet had no list for {:.1} s at most, {} counted pods came meanwhile, {} of them failed, and {} at any other time",
            self.longest_s(),
            self.on_their_way(),
            self.failed(),
            self.failed_outside.len()
        )
    }

    /// A line for each gap, and one for what failed outside.
    pub fn told(&self) -> String {
        let mut text = String::new();
        for gap in &self.all {
            let _ = writeln!(
                text,
                "gap: {:?} struck after {:.1} s, no list for {:.2} s; counted pods on their way {}, failed {} {:?}",
                gap.struck,
                gap.after_s,
                gap.seconds,
                gap.on_their_way,
                gap.failed.len(),
                gap.failed
            );
        }
        if !self.failed_outside.is_empty() {
            let _ = writeln!(
                text,
                "failed outside of every gap: {:?}",
                self.failed_outside
            );
        }
        text
    }
}

/// What the kubelet's log says of its list of counted GPUs, and of the pods that came to it.
#[derive(Debug, Default)]
pub struct Kubelet {
    /// When a device plugin was connected.
    connected: Vec<Duration>,
    /// When a list of one was taken over.
    listed: Vec<Duration>,
    /// When each pod first came.
    came: BTreeMap<String, Duration>,
    /// When any pods came from the API server: the first time after a start those that are there.
    heard: Vec<Duration>,
}

impl Kubelet {
    /// Reads a log of level 2 (kubernetes v1.37.2, `PluginConnected` and `genericDeviceUpdateCallback` in
    /// `pkg/kubelet/cm/devicemanager/manager.go`, `syncLoopIteration` in `pkg/kubelet/kubelet.go`).
    pub fn read(log: &str, clock: &Clock) -> Self {
        let mut kubelet = Self::default();
        for line in log.lines() {
            let Some((at, what)) = clock.klog(line) else {
                continue;
            };
            let is_ours = what.contains("resourceName=\"nvidia.com/gpu\"");
            if is_ours && what.contains("\"Device plugin connected\"") {
                kubelet.connected.push(at);
            } else if is_ours && what.contains("\"Processed device updates for resource\"") {
                kubelet.listed.push(at);
            } else if what.contains("\"SyncLoop ADD\" source=\"api\"") {
                kubelet.heard.push(at);
                let quoted = what.split('"').filter_map(|part| part.split_once('/'));
                for (_, pod) in quoted {
                    kubelet.came.entry(pod.to_owned()).or_insert(at);
                }
            }
        }
        kubelet
    }

    /// When the kubelet had read the list of a plugin that was connected after this blow, and had heard of its pods if
    /// it was the one that was struck.
    fn serves_after(&self, strike: &Strike) -> Option<Duration> {
        let first_after = |times: &[Duration], time: Duration| {
            times.iter().copied().filter(|at| *at >= time).min()
        };
        let has_list = first_after(&self.listed, first_after(&self.connected, strike.at)?)?;
        if strike.whom != Struck::Kubelet {
            return Some(has_list);
        }
        Some(has_list.max(first_after(&self.heard, strike.at)?))
    }

    /// From when a pod was bound until it ran, failed or was on its way out. The kubelet may hear of it before us.
    fn way_of(&self, name: &str, life: &Life) -> Option<(Duration, Duration)> {
        let came = self.came.get(name).copied();
        let from = life.bound.into_iter().chain(came).min()?;
        let failed = life.failed.as_ref().map(|it| it.at);
        let ends = [life.running, failed, life.deleted, life.gone];
        let to = ends.into_iter().flatten().min().unwrap_or(Duration::MAX);
        Some((from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::super::dice::Dice;
    use super::super::life::Trouble;
    use super::super::load::{Fate, Load};
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn pod(bound: u64, running: Option<u64>, failed: Option<u64>) -> Life {
        let fate = Fate::next(&Load::named("kills"), &mut Dice::new(1, 1));
        let mut life = Life::new(Kind::Counted, fate, 0);
        life.bound = Some(s(bound));
        life.running = running.map(s);
        life.failed = failed.map(|at| Trouble {
            at: s(at),
            why: String::new(),
        });
        life
    }

    /// Somebody is struck after 10 s, the kubelet reads a list again after 13 s, and hears of pods after 16 s.
    fn gaps(whom: Struck, lives: Vec<(&str, Life)>) -> Gaps {
        let lives = lives
            .into_iter()
            .map(|(name, life)| (name.to_owned(), life))
            .collect();
        let strike = Strike { at: s(10), whom };
        let kubelet = Kubelet {
            connected: vec![s(1), s(12)],
            // The list of 11 s is the last word of the daemon before.
            listed: vec![s(2), s(11), s(13), s(20)],
            came: BTreeMap::from([("early".to_owned(), s(13))]),
            heard: vec![s(9), s(16)],
        };
        Gaps::of(&lives, &[strike], &kubelet, (s(0), s(30)))
    }

    #[test]
    fn who_fails_on_its_way_in_a_gap_is_listed_there() {
        let gaps = gaps(
            Struck::Daemon,
            vec![
                ("before", pod(9, None, Some(10))),
                ("within", pod(12, None, Some(12))),
                ("late", pod(13, None, Some(14))),
                // The kubelet heard of it while it had no list, and we a second later.
                ("early", pod(14, None, Some(14))),
                ("lucky", pod(12, Some(14), None)),
                ("other", pod(14, Some(15), None)),
            ],
        );
        assert_eq!(gaps.all.len(), 1);
        assert_eq!(gaps.all[0].failed, ["before", "early", "late", "within"]);
        assert_eq!(gaps.all[0].on_their_way, 5);
        assert_eq!(gaps.all[0].seconds, 3.0);
        assert!(gaps.failed_outside.is_empty(), "{gaps:?}");
    }

    #[test]
    fn who_fails_at_another_time_or_after_it_ran_is_outside_of_every_gap() {
        let gaps = gaps(
            Struck::Daemon,
            vec![
                ("sooner", pod(5, None, Some(6))),
                ("later", pod(14, None, Some(15))),
                ("ran", pod(5, Some(6), Some(12))),
            ],
        );
        assert_eq!(gaps.failed_outside, ["later", "ran", "sooner"]);
        assert_eq!(gaps.failed(), 0);
        assert!(gaps.told().contains("outside of every gap"));
    }

    #[test]
    fn a_kubelet_that_was_struck_has_to_hear_of_its_pods_too() {
        let gaps = gaps(
            Struck::Kubelet,
            vec![
                ("unheard", pod(14, None, Some(15))),
                ("later", pod(17, None, Some(18))),
            ],
        );
        assert_eq!(gaps.all[0].failed, ["unheard"]);
        assert_eq!(gaps.all[0].seconds, 6.0);
        assert_eq!(gaps.failed_outside, ["later"]);
    }

    #[test]
    fn the_kubelets_log_tells_when_a_list_was_read_and_when_a_pod_came() {
        let clock = Clock::now();
        let now = jiff::Timestamp::now().to_string();
        let second = &now[..19];
        let head = |tenth: u32| {
            format!(
                "I{}{} {}.{tenth}00000    7 manager.go:1]",
                &now[5..7],
                &now[8..10],
                &now[11..19]
            )
        };
        let log = [
            format!(
                "{} \"Device plugin connected\" resourceName=\"nvidia.com/gpu\"",
                head(1)
            ),
            format!(
                "{} \"Processed device updates for resource\" resourceName=\"other\" x=1",
                head(2)
            ),
            format!(
                "{} \"Processed device updates for resource\" resourceName=\"nvidia.com/gpu\" x=1",
                head(3)
            ),
            format!(
                "{} \"SyncLoop ADD\" source=\"api\" pods=[\"default/a-1\",\"default/a-12\"]",
                head(4)
            ),
            "what it said of itself".to_owned(),
        ];
        let kubelet = Kubelet::read(&log.join("\n"), &clock);
        let at = |tenth: u32| clock.monotonic(&format!("{second}.{tenth}Z"));
        assert_eq!(kubelet.connected, [at(1)]);
        assert_eq!(kubelet.listed, [at(3)]);
        let came = [("a-1", at(4)), ("a-12", at(4))];
        let came = came.map(|(pod, at)| (pod.to_owned(), at));
        assert_eq!(kubelet.came, BTreeMap::from(came));
        assert_eq!(kubelet.heard, [at(4)]);
        let serves_after = |whom, tenth| {
            kubelet.serves_after(&Strike {
                at: at(tenth),
                whom,
            })
        };
        assert_eq!(serves_after(Struck::Daemon, 1), Some(at(3)));
        assert_eq!(serves_after(Struck::Daemon, 2), None);
        assert_eq!(serves_after(Struck::Kubelet, 1), Some(at(4)));
    }
}
