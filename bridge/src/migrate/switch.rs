//! Makes the change of mode, and waits until it is complete.
//!
//! It writes one object, the ConfigMap or the Node's label, and from there on the daemons go on by themselves: who ends
//! this verb half-way leaves a switch that goes on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bridge_core::Mode;
use tokio::time::Instant;

use super::cluster::Cluster;
use super::plan::Mapped;
use super::progress::{Stage, stage};
use crate::client;
use crate::config::profile::LABEL;
use crate::config::{self, Config, Document, KEY, MapName, Source};

/// Pause between two looks at the nodes; each is some lists.
const LOOK: Duration = Duration::from_secs(1);

/// Nodes that one line names: beyond that nobody reads them.
const NODES_NAMED: usize = 5;

/// Annotation of the ConfigMap: the mode before the last switch.
const FORMER_MODE: &str = "gpu-bridge.dev/former-mode";
/// Annotation of a Node: its profile before the last switch; empty: none.
const FORMER_PROFILE: &str = "gpu-bridge.dev/former-profile";

/// Where to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// To a mode.
    Mode(Mode),
    /// To where it was before the last switch.
    Former,
}

/// What is to be switched.
#[derive(Debug, Clone)]
pub struct Switch {
    /// The ConfigMap with the configuration.
    pub map: MapName,
    /// One node, by its profile; `None`: all whose mode is that of the ConfigMap.
    pub node: Option<String>,
    /// The profile for that node, where more than one has the mode.
    pub profile: Option<String>,
    /// Where to.
    pub target: Target,
    /// How long the end is waited for.
    pub limit: Duration,
}

/// How the wait ended; of several nodes the last of these counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Every node is as the mode says, and nobody is left whom it closes out.
    Complete,
    /// It is in force, and some have not ended yet.
    Waits,
    /// A node does not show it yet.
    NotInForce,
}

/// Why nothing was switched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server said no.
    #[error(transparent)]
    Cluster(#[from] client::Error),
    /// The configuration is not good as it is.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// It can't be done as it was asked.
    #[error("{0}")]
    Impossible(String),
}

/// What was written, and where it shows.
struct Written {
    /// The configuration as it is now.
    document: Document,
    mode: Mode,
    nodes: Vec<String>,
    /// In words.
    what: String,
}

impl Switch {
    /// Writes, and tells how far it is, until it is complete or the time is up.
    ///
    /// # Errors
    /// Nothing was written.
    pub async fn run(
        &self,
        cluster: &Cluster,
        mut tell: impl FnMut(&str),
    ) -> Result<Outcome, Error> {
        let written = match &self.node {
            Some(node) => self.label(cluster, node).await?,
            None => self.write(cluster).await?,
        };
        tell(&written.what);
        if written.nodes.is_empty() {
            tell("no node has a pod of gpu-bridge that goes by it");
        }
        if let Some(words) = self.overlapped(cluster, &written.document).await {
            tell(&words);
        }
        let deadline = Instant::now() + self.limit;
        let mut told: BTreeMap<&str, String> = BTreeMap::new();
        loop {
            let mut outcome = Outcome::Complete;
            let seen = cluster.look(&written.nodes).await;
            for (node, seen) in written.nodes.iter().zip(seen) {
                let seen = seen.map(|seen| stage(&seen.holders, seen.shown, written.mode));
                let (reached, words) = match seen {
                    Ok(stage) => describe(&stage, written.mode),
                    // It is written already, and the server may be back with the next look.
                    Err(error) => (
                        Outcome::NotInForce,
                        format!("can't be looked at now: {error}"),
                    ),
                };
                outcome = outcome.max(reached);
                if told.get(node.as_str()) != Some(&words) {
                    tell(&format!("{node}: {words}"));
                    told.insert(node, words);
                }
            }
            if outcome == Outcome::Complete || Instant::now() + LOOK > deadline {
                return Ok(outcome);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// What there is to say where a class makes claims of counted pods and a node serves both kinds: classes are for
    /// all nodes, modes for each.
    async fn overlapped(&self, cluster: &Cluster, document: &Document) -> Option<String> {
        let Mapped::By(class) = cluster.mapped().await else {
            return None;
        };
        let can_be_0 = |config: &Config| config.settings.can_count_be_0_beside_claims();
        let mut nodes: Vec<String> = match cluster.nodes(&self.map.namespace).await {
            Ok(nodes) => nodes
                .into_iter()
                .filter(|(_, profile)| document.choose(profile.as_deref()).is_ok_and(can_be_0))
                .map(|(node, _)| node)
                .collect(),
            Err(error) => vec![format!("nodes in mode both, if there are any: {error}")],
        };
        let untold = nodes.len().saturating_sub(NODES_NAMED);
        nodes.truncate(NODES_NAMED);
        let more = if untold > 0 {
            format!(" and {untold} more")
        } else {
            String::new()
        };
        (!nodes.is_empty()).then(|| {
            format!(
                "{class} has the extendedResourceName nvidia.com/gpu, so counted pods get claims whenever the count is 0, \
                 which it can be on {}{more}; set offers.minLegacy: 1 there, or take the name from the class",
                nodes.join(", ")
            )
        })
    }

    fn origin(&self) -> PathBuf {
        Source::ConfigMap(self.map.clone()).origin()
    }

    /// Writes the mode into the ConfigMap.
    async fn write(&self, cluster: &Cluster) -> Result<Written, Error> {
        let mut map = cluster.config_map(&self.map).await?;
        let data = map.data.get_or_insert_default();
        let text = data.get(KEY).cloned().unwrap_or_default();
        let before = config::read_text(&self.origin(), text.clone())?;
        let annotations = map.metadata.annotations.get_or_insert_default();
        let mode = match &self.target {
            Target::Mode(mode) => *mode,
            Target::Former => {
                let former = annotations.get(FORMER_MODE);
                former.and_then(|word| mode_of(word)).ok_or_else(|| {
                    Error::Impossible(format!("the ConfigMap {} has not been switched before, so there is nothing to go back to", self.map))
                })?
            }
        };
        let changed = config::with_mode(&self.origin(), &text, mode).ok_or_else(|| {
            Error::Impossible(format!(
                "the mode can't be written into {KEY} of the ConfigMap {}, because of its shape; write mode: {} by hand",
                self.map, mode.as_str()
            ))
        })?;
        let former = before.base.settings.mode;
        let after = config::read_text(&self.origin(), changed.clone())?;
        let is_news = former != mode;
        if is_news {
            annotations.insert(FORMER_MODE.to_owned(), former.as_str().to_owned());
            data.insert(KEY.to_owned(), changed);
            cluster.write_config_map(&self.map, &map).await?;
        }
        let nodes = cluster.nodes(&self.map.namespace).await?;
        let goes_by_it = |profile: &Option<String>| {
            let chosen = after.choose(profile.as_deref());
            chosen.is_ok_and(|config| config.settings.mode == mode)
        };
        let nodes = nodes.into_iter().filter(|(_, profile)| goes_by_it(profile));
        let nodes = nodes.map(|(node, _)| node).collect();
        Ok(Written {
            document: after,
            mode,
            nodes,
            what: if is_news {
                format!(
                    "ConfigMap {}: mode {} -> {}",
                    self.map,
                    former.as_str(),
                    mode.as_str()
                )
            } else {
                format!(
                    "ConfigMap {}: the mode is {} already",
                    self.map,
                    mode.as_str()
                )
            },
        })
    }

    /// Labels the node with a profile that has the mode.
    async fn label(&self, cluster: &Cluster, node: &str) -> Result<Written, Error> {
        let map = cluster.config_map(&self.map).await?;
        let text = map.data.unwrap_or_default().remove(KEY).unwrap_or_default();
        let document = config::read_text(&self.origin(), text)?;
        let before = cluster.profile(node).await?;
        let profile = match (&self.target, &self.profile) {
            (Target::Mode(_), Some(name)) => Some(name.clone()),
            (Target::Mode(mode), None) => choose(&document, *mode, before.as_deref())?,
            (Target::Former, _) => {
                let former = cluster.annotation(node, FORMER_PROFILE).await?;
                let former = former.ok_or_else(|| {
                    Error::Impossible(format!("the Node {node} has not been switched before, so there is nothing to go back to"))
                })?;
                Some(former).filter(|name| !name.is_empty())
            }
        };
        let config = document.choose(profile.as_deref()).map_err(|known| {
            let name = profile.as_deref().unwrap_or_default();
            Error::Impossible(format!(
                "the ConfigMap {} has no profile {name}; it has {}",
                self.map,
                known.join(", ")
            ))
        })?;
        let mode = config.settings.mode;
        if let Target::Mode(wanted) = self.target
            && wanted != mode
        {
            let name = profile.as_deref().unwrap_or_default();
            return Err(Error::Impossible(format!(
                "the profile {name} has the mode {}, not {}",
                mode.as_str(),
                wanted.as_str()
            )));
        }
        let shown = |profile: &Option<String>| profile.clone().unwrap_or_else(|| "none".to_owned());
        let is_news = before != profile;
        if is_news {
            let note = (FORMER_PROFILE, before.as_deref().unwrap_or_default());
            cluster.set_profile(node, profile.as_deref(), note).await?;
        }
        Ok(Written {
            document,
            mode,
            nodes: vec![node.to_owned()],
            what: if is_news {
                format!(
                    "Node {node}: profile {} -> {}, which has the mode {}",
                    shown(&before),
                    shown(&profile),
                    mode.as_str()
                )
            } else {
                format!(
                    "Node {node}: its profile {} has the mode {} already",
                    shown(&profile),
                    mode.as_str()
                )
            },
        })
    }
}

/// The profile that has a mode: the node's own, none, or the only one.
fn choose(document: &Document, mode: Mode, own: Option<&str>) -> Result<Option<String>, Error> {
    let has = |profile: Option<&str>| {
        let chosen = document.choose(profile);
        chosen.is_ok_and(|config| config.settings.mode == mode)
    };
    for profile in [own, None] {
        if has(profile) {
            return Ok(profile.map(str::to_owned));
        }
    }
    let with: Vec<&String> = document
        .profiles
        .keys()
        .filter(|name| has(Some(name)))
        .collect();
    match with.as_slice() {
        [only] => Ok(Some((*only).clone())),
        [] => Err(Error::Impossible(format!(
            "no profile has the mode {0}; add one to the ConfigMap, as in profiles: {{{0}-only: {{mode: {0}}}}}",
            mode.as_str()
        ))),
        many => {
            let names: Vec<&str> = many.iter().map(|name| name.as_str()).collect();
            Err(Error::Impossible(format!(
                "several profiles have the mode {}: {}; say which with --profile",
                mode.as_str(),
                names.join(", ")
            )))
        }
    }
}

/// The mode with that name.
pub(crate) fn mode_of(word: &str) -> Option<Mode> {
    Mode::ALL.into_iter().find(|mode| mode.as_str() == word)
}

fn describe(stage: &Stage, mode: Mode) -> (Outcome, String) {
    let mode = mode.as_str();
    match stage {
        Stage::NotInForce => (
            Outcome::NotInForce,
            format!(
                "does not show the mode {mode} yet; the label {LABEL} or the ConfigMap has to reach it"
            ),
        ),
        Stage::Waits(first) => {
            let names: Vec<String> = first.iter().map(ToString::to_string).collect();
            (
                Outcome::Waits,
                format!(
                    "the mode {mode} is in force, and waits for the end of {}",
                    names.join(", ")
                ),
            )
        }
        Stage::Complete => (
            Outcome::Complete,
            format!("the mode {mode} is in force, and complete"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_mode(mode: Mode) -> Config {
        let mut config = Config::default();
        config.settings.mode = mode;
        config
    }

    #[test]
    fn a_node_gets_the_only_profile_that_has_the_mode() {
        let mut document = Document::default();
        document
            .profiles
            .insert("a".to_owned(), with_mode(Mode::Dra));
        document
            .profiles
            .insert("b".to_owned(), with_mode(Mode::Legacy));
        let chosen = |document: &Document, mode, own| choose(document, mode, own).ok().flatten();
        assert_eq!(chosen(&document, Mode::Dra, None).as_deref(), Some("a"));
        assert_eq!(chosen(&document, Mode::Both, Some("a")), None);
        assert!(choose(&document, Mode::Both, Some("a")).is_ok());
        let none = choose(&document, Mode::Drained, None)
            .unwrap_err()
            .to_string();
        assert!(none.contains("drained-only: {mode: drained}"), "{none}");
        document
            .profiles
            .insert("c".to_owned(), with_mode(Mode::Dra));
        let many = choose(&document, Mode::Dra, None).unwrap_err().to_string();
        assert!(
            many.contains("a, c") && many.contains("--profile"),
            "{many}"
        );
        assert_eq!(
            chosen(&document, Mode::Dra, Some("c")).as_deref(),
            Some("c")
        );
    }
}
