//! The chapters of the demo: what happens, what is looked at, and which promise of the README it proves.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::node::{GPUS, Node, until};

/// Counted pods that come first.
const COUNTED: [&str; 3] = ["counted-a", "counted-b", "counted-c"];
/// Pods with a claim that come after them.
const CLAIMANTS: [&str; 2] = ["claim-d", "claim-e"];
/// The pod whose claim is allocated to a GPU that a counted pod has.
const LOSER: &str = "claim-late";
/// The pod that gets a GPU of a counted pod after that has ended.
const HEIR: &str = "claim-f";
/// Spaces before what the program under demonstration says.
const INDENT: &str = "    ";

/// A part of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chapter {
    /// What happens.
    pub title: &'static str,
    /// The promise of the README that it proves, in the README's words.
    pub promise: &'static str,
    scene: Scene,
}

/// What a chapter does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scene {
    Start,
    Arrivals,
    Race,
    Kill,
    Switch,
    Ends,
}

/// All of them, in order.
const CHAPTERS: [Chapter; 6] = [
    Chapter {
        scene: Scene::Start,
        title: "One daemon serves 8 GPUs, and each scheduler sees all of them",
        promise: "Both kinds draw from all GPUs.",
    },
    Chapter {
        scene: Scene::Arrivals,
        title: "Counted pods and claims arrive",
        promise: "A GPU has one holder.",
    },
    Chapter {
        scene: Scene::Race,
        title: "A race: a claim is allocated to the GPU of a counted pod",
        promise: "A refusal can be understood.",
    },
    Chapter {
        scene: Scene::Kill,
        title: "kill -9 of the daemon, and a new start",
        promise: "Nothing is said before it is saved.",
    },
    Chapter {
        scene: Scene::Switch,
        title: "The mode becomes `dra` by an edit of the configuration file",
        promise: "A running pod is never touched.",
    },
    Chapter {
        scene: Scene::Ends,
        title: "Pods end, and their GPUs are for others",
        promise: "A GPU changes hands only when it is free.",
    },
];

/// A chapter that went as it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Which.
    pub chapter: Chapter,
    /// What was seen, in a sentence.
    pub seen: String,
}

/// The whole story.
pub(crate) async fn play(program: &Path, out: &mut dyn Write) -> anyhow::Result<Vec<Shown>> {
    let started = Instant::now();
    let node = Node::new(program).await?;
    let mut story = Story {
        node,
        out,
        shown: Vec::new(),
    };
    if let Err(error) = story.tell().await {
        let chapter = story.shown.len();
        let title = CHAPTERS.get(chapter).map_or("the end", |it| it.title);
        let log = story.node.log();
        return Err(error.context(format!(
            "chapter {} is not as it should be ({title}).\nThe end of the daemon's log:\n{log}\nWhat was expected",
            chapter + 1,
        )));
    }
    story.sum_up(started.elapsed())?;
    Ok(story.shown)
}

struct Story<'out> {
    node: Node,
    out: &'out mut dyn Write,
    shown: Vec<Shown>,
}

impl Story<'_> {
    async fn tell(&mut self) -> anyhow::Result<()> {
        for (number, chapter) in (1..).zip(CHAPTERS) {
            self.say(&format!("\n{number}/{} {}", CHAPTERS.len(), chapter.title))?;
            let seen = match chapter.scene {
                Scene::Start => self.start().await?,
                Scene::Arrivals => self.arrivals().await?,
                Scene::Race => self.race().await?,
                Scene::Kill => self.kill().await?,
                Scene::Switch => self.switch().await?,
                Scene::Ends => self.ends().await?,
            };
            self.say(&format!("  => {seen}"))?;
            self.shown.push(Shown { chapter, seen });
        }
        Ok(())
    }

    fn say(&mut self, line: &str) -> anyhow::Result<()> {
        writeln!(self.out, "{line}")?;
        Ok(self.out.flush()?)
    }

    /// What `gpu-bridge status` says now.
    fn show_status(&mut self) -> anyhow::Result<()> {
        self.say("  $ gpu-bridge status")?;
        let table = self.node.table()?;
        for line in table.lines() {
            self.say(format!("{INDENT}{line}").trim_end())?;
        }
        Ok(())
    }

    fn sum_up(&mut self, took: Duration) -> anyhow::Result<()> {
        self.say("\nWhat was shown, and the promise that each step proves:")?;
        let width = CHAPTERS.iter().map(|it| it.promise.len()).max();
        let width = width.unwrap_or(0);
        for Shown { chapter, seen } in self.shown.clone() {
            self.say(&format!("  {:width$}  {seen}", chapter.promise))?;
        }
        self.say(&format!("All of it was checked, in {} s.", took.as_secs()))
    }
}

// --- The chapters ---

impl Story<'_> {
    async fn start(&mut self) -> anyhow::Result<String> {
        self.node.configure("both")?;
        self.node.start()?;
        self.node.ready().await?;
        let node = &self.node;
        until("all GPUs are in the count and in the slice", async || {
            Ok(node.count() == Some(GPUS) && node.open_devices().len() == GPUS)
        })
        .await?;
        ensure!(self.node.healthy() == GPUS, "the kubelet counts {GPUS} ids");
        self.show_status()?;
        Ok(format!(
            "the Node counts {GPUS}, and the ResourceSlice offers {GPUS} without a taint"
        ))
    }

    async fn arrivals(&mut self) -> anyhow::Result<String> {
        for name in COUNTED {
            self.node.run_counted(name).await?;
            self.say(&format!("  {name} asks for nvidia.com/gpu: 1, and runs"))?;
        }
        for name in CLAIMANTS {
            self.node.run_claimant(name, None).await?;
            self.say(&format!("  {name} brings a ResourceClaim, and runs"))?;
        }
        self.held(&[("Bound", &COUNTED), ("Prepared", &CLAIMANTS)])
            .await?;
        self.show_status()?;
        let pods = COUNTED.len() + CLAIMANTS.len();
        self.each_sees_one_gpu(pods)?;
        Ok(format!(
            "{pods} pods of both kinds see {pods} different GPUs in their device files"
        ))
    }

    async fn race(&mut self) -> anyhow::Result<String> {
        let winner = COUNTED[0];
        let unit = self.node.unit_of(winner)?;
        let device = self.node.device_of(&unit)?;
        let before = self.node.holds()?;
        self.say(&format!(
            "  {device} is {winner}'s; a scheduler with an old view allocates it to {LOSER}.\n  \
             Prepare waits up to 10 s for the GPU, and then its refusal is the pod's event:"
        ))?;
        let answer = self.node.prepare_claimant(LOSER, &device).await;
        let sentence = answer
            .err()
            .context("the claim is refused, and not prepared")?;
        self.say(&format!("{INDENT}{sentence}"))?;
        for part in ["UnitHeld", &unit, "by count"] {
            ensure!(
                sentence.contains(part),
                "the refusal says {part:?}: {sentence}"
            );
        }
        ensure!(
            !sentence.contains(winner),
            "the refusal names no pod of another tenant: {sentence}"
        );
        ensure!(self.node.holds()? == before, "no hold has changed");
        self.say("  Nothing of that pod has started, so Kubernetes evicts it by the device's taint, and its owner makes a new one.")?;
        let node = &self.node;
        until("the taint of the device evicts", async || {
            Ok(node.taint_effect(&device).as_deref() == Some("NoExecute"))
        })
        .await?;
        self.node.end_pod(LOSER).await?;
        let node = &self.node;
        until("the taint evicts nobody any more", async || {
            Ok(node.taint_effect(&device).as_deref() != Some("NoExecute"))
        })
        .await?;
        ensure!(
            self.node.unit_of(winner)? == unit,
            "{winner} has its GPU still"
        );
        Ok(format!(
            "the claim was refused with UnitHeld, and {winner} runs on"
        ))
    }

    async fn kill(&mut self) -> anyhow::Result<String> {
        let before = self.node.holds()?;
        let first = self.node.pid();
        self.node.kill()?;
        self.say(&format!("  $ kill -9 {first}"))?;
        ensure!(!self.node.answers()?, "nobody answers after the kill");
        self.node.start()?;
        self.node.ready().await?;
        ensure!(self.node.pid() != first, "another process serves");
        let after = self.node.holds()?;
        ensure!(after == before, "after the restart: {after:?}");
        self.show_status()?;
        self.each_sees_one_gpu(before.len())?;
        Ok(format!(
            "{} of {} holds are there again, with holder, GPU and time",
            after.len(),
            before.len()
        ))
    }

    async fn switch(&mut self) -> anyhow::Result<String> {
        let before = self.node.holds()?;
        self.node.configure("dra")?;
        let free = GPUS - COUNTED.len() - CLAIMANTS.len();
        let node = &self.node;
        until("the new mode is in force on both faces", async || {
            let is_dra = node.status()?["mode"] == "dra";
            let offered = node.open_devices().len() == free && node.count() == Some(0);
            Ok(is_dra && offered && node.healthy() == COUNTED.len())
        })
        .await?;
        ensure!(self.node.holds()? == before, "no hold has changed");
        self.show_status()?;
        Ok(format!(
            "counted pods are offered 0 GPUs, claims the {free} free ones, and all {} pods run on",
            before.len()
        ))
    }

    async fn ends(&mut self) -> anyhow::Result<String> {
        let unit = self.node.unit_of(COUNTED[0])?;
        let device = self.node.device_of(&unit)?;
        self.node.end_pod(COUNTED[0]).await?;
        self.node.run_claimant(HEIR, Some(&device)).await?;
        ensure!(self.node.unit_of(HEIR)? == unit, "{HEIR} has {unit}");
        self.say(&format!(
            "  {} ends, and {HEIR} gets its GPU, {device}, by a claim",
            COUNTED[0]
        ))?;
        for name in self.node.pods() {
            self.node.end_pod(&name).await?;
        }
        self.say("  all pods end")?;
        let node = &self.node;
        until("nothing is held and everything is on offer", async || {
            Ok(node.holds()?.is_empty() && node.open_devices().len() == GPUS)
        })
        .await?;
        self.show_status()?;
        Ok(format!(
            "a counted pod's GPU went to a claim, and at last all {GPUS} are free"
        ))
    }

    /// Waits until these pods hold one GPU each in these phases, and nobody else holds any.
    async fn held(&self, expected: &[(&str, &[&str])]) -> anyhow::Result<()> {
        let expected: BTreeSet<(&str, &str)> = expected
            .iter()
            .flat_map(|(phase, names)| names.iter().map(move |name| (*phase, *name)))
            .collect();
        let node = &self.node;
        until(&format!("the holds are {expected:?}"), async || {
            let holds = node.holds()?;
            let found: BTreeSet<(&str, &str)> = holds
                .iter()
                .map(|[_, phase, by, _]| (phase.as_str(), by.as_str()))
                .collect();
            Ok(found == expected && holds.len() == expected.len())
        })
        .await
    }

    /// Every pod has the device file of one GPU, and no two have the same.
    fn each_sees_one_gpu(&self, pods: usize) -> anyhow::Result<()> {
        let mut seen = BTreeSet::new();
        for name in self.node.pods() {
            let files = self.node.device_files(&name)?;
            let is_gpu = |file: &&String| {
                let number = file.strip_prefix("/dev/nvidia");
                number.is_some_and(|it| it.parse::<u32>().is_ok())
            };
            let gpus: Vec<&String> = files.iter().filter(is_gpu).collect();
            ensure!(
                gpus.len() == 1,
                "{name} sees one GPU in its device files: {files:?}"
            );
            ensure!(
                seen.insert(gpus[0].clone()),
                "{name} sees {} alone",
                gpus[0]
            );
        }
        ensure!(seen.len() == pods, "{pods} GPUs are seen: {seen:?}");
        Ok(())
    }
}
