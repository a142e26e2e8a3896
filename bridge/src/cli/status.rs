//! `gpu-bridge status`: who has which GPU on this node, as the daemon here says.

use clap::{Args, ValueEnum};

use super::socket::SocketArgs;
use super::table::Table;
use crate::admin::{self, ClientError, HoldPage, HolderPage, StatusPage, UnitPage};

/// The flags of `status`.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// How the answer is written.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
}

/// How the answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Output {
    /// One line per hold.
    #[default]
    Table,
    /// The page of /status.
    Json,
}

impl StatusArgs {
    /// Asks the daemon; returns the text to print.
    ///
    /// # Errors
    /// The daemon is not there, or does not answer with a status page.
    pub(super) async fn ask(self) -> Result<String, ClientError> {
        let page = admin::status(&self.socket.path()).await?;
        Ok(match self.output {
            Output::Table => describe(&page),
            Output::Json => {
                serde_json::to_string_pretty(&page).expect("a page of texts and numbers is JSON")
                    + "\n"
            }
        })
    }
}

/// The page as a person reads it.
fn describe(page: &StatusPage) -> String {
    let mut text = format!(
        "node {}, mode {}, limits: legacy {}, dra {}\nledger {}, generation {}\n\n",
        page.node,
        page.mode,
        limit(page.limits.legacy),
        limit(page.limits.dra),
        page.standing,
        page.generation
    );
    let mut table = Table::new(["GPU", "UUID", "PRODUCT", "STATE", "HOLDER", "FACE", "SINCE"]);
    for unit in &page.units {
        add_rows(&mut table, unit);
    }
    text.push_str(&table.to_string());
    add_section(&mut text, "", substitutions(page));
    add_section(&mut text, "what the mode waits for:\n", unfinished(page));
    add_section(&mut text, "what limits the node:\n", limits(page));
    text
}

/// Who still holds something through a face that the mode has closed, and what is still on its way from it.
fn unfinished(page: &StatusPage) -> impl Iterator<Item = String> {
    let closes = |face: &str| match page.mode.as_str() {
        "drained" => true,
        "dra" => face == "legacy",
        "legacy" => face == "dra",
        _ => false,
    };
    page.units.iter().flat_map(move |unit| {
        let held = unit.holds.iter().filter_map(move |hold| {
            let face = hold.face.as_deref().filter(|face| closes(face))?;
            let since = seconds(&hold.since);
            let (holder, device) = (holder(hold), &unit.device);
            Some(format!(
                "  the end of {holder}, which has {device} through {face} since {since}"
            ))
        });
        let moving = (unit.state == "Moving" && page.mode != "both").then(|| {
            format!(
                "  the move of {}, which somebody may still have been promised",
                unit.device
            )
        });
        held.chain(moving)
    })
}

/// Lines below the table, if there are any.
fn add_section(text: &mut String, head: &str, lines: impl Iterator<Item = String>) {
    let mut lines = lines.peekable();
    if lines.peek().is_none() {
        return;
    }
    text.push('\n');
    text.push_str(head);
    for line in lines {
        text.push_str(&line);
        text.push('\n');
    }
}

fn add_rows(table: &mut Table<7>, unit: &UnitPage) {
    let mut row = |state: &str, holder: String, face: &str, since: String| {
        table.add([
            unit.device.clone(),
            unit.unit.clone(),
            unit.product.clone(),
            state.to_owned(),
            holder,
            face.to_owned(),
            since,
        ]);
    };
    if unit.holds.is_empty() {
        row(&unit.state, "-".to_owned(), &unit.side, "-".to_owned());
        return;
    }
    for hold in &unit.holds {
        let state = if unit.present {
            hold.phase.clone()
        } else {
            format!("{}, GPU lost", hold.phase)
        };
        let face = hold.face.as_deref().unwrap_or("-");
        row(&state, holder(hold), face, seconds(&hold.since));
    }
}

/// Who has it, in words.
pub(super) fn holder(hold: &HoldPage) -> String {
    let name = |holder: &HolderPage| format!("{}/{}", holder.namespace, holder.name);
    let named = match (&hold.pod, &hold.claim) {
        (Some(pod), _) => Some(format!("pod {}", name(pod))),
        (None, Some(claim)) => Some(format!("claim {}", name(claim))),
        (None, None) => None,
    };
    match (hold.cause.as_deref(), named) {
        (Some("Lingering"), Some(named)) => format!("{named} (ended, its process runs on)"),
        (Some("Lingering"), None) => "a counted pod (ended, its process runs on)".to_owned(),
        (Some("UnknownUnitOf"), Some(named)) => format!("perhaps {named}"),
        (Some(_), _) => "an unknown process".to_owned(),
        (None, Some(named)) => named,
        (None, None) => "a counted pod (not seen yet)".to_owned(),
    }
}

fn substitutions(page: &StatusPage) -> impl Iterator<Item = String> {
    page.units.iter().filter_map(|unit| {
        let id = unit.id.as_ref().filter(|id| **id != unit.unit)?;
        Some(format!(
            "The kubelet's id {id} stands for {} ({}) now.",
            unit.device, unit.unit
        ))
    })
}

/// Why the node does less than it could. The word is the name of a page in `migration-guide/reasons`, or of the
/// condition.
fn limits(page: &StatusPage) -> impl Iterator<Item = String> {
    let limiting = page.conditions.iter();
    limiting
        .filter(|condition| condition.limits || !condition.ok)
        .map(|condition| {
            let message = &condition.message;
            let word = condition.reason.as_ref().unwrap_or(&condition.name);
            // A sentence of a reason opens with it.
            let sentence = message
                .strip_prefix(word.as_str())
                .and_then(|rest| rest.strip_prefix(": "))
                .unwrap_or(message);
            let since = seconds(&condition.since);
            format!("  {word} since {since}: {sentence}")
        })
}

fn limit(limit: Option<u32>) -> String {
    limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string())
}

/// The time without its milliseconds, which nobody wants in a table.
pub(super) fn seconds(time: &str) -> String {
    match time.split_once('.') {
        Some((seconds, _)) => format!("{seconds}Z"),
        None => time.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn the_table_names_every_holder_in_words() {
        let golden = include_str!("../../../tests/golden/status.json");
        let mut page: StatusPage = serde_json::from_str(golden).unwrap();
        page.units[1].id = Some("GPU-9".to_owned());
        page.units[3].present = false;
        expect![[r#"
            node node-1, mode both, limits: legacy 5, dra none
            ledger Serving, generation 12

            GPU     UUID    PRODUCT                STATE               HOLDER                                           FACE    SINCE
            gpu-0   GPU-0   NVIDIA H100 80GB HBM3  Granted             a counted pod (not seen yet)                     legacy  2026-09-21T14:13:20Z
            gpu-1   GPU-1   NVIDIA H100 80GB HBM3  Bound               pod default/counted                              legacy  2026-09-21T14:13:20Z
            gpu-2   GPU-2   NVIDIA H100 80GB HBM3  Reserved            claim train/llm                                  dra     2026-09-21T14:13:20Z
            gpu-3   GPU-3   NVIDIA H100 80GB HBM3  Prepared, GPU lost  claim train/llm                                  dra     2026-09-21T14:13:20Z
            gpu-4   GPU-4   NVIDIA H100 80GB HBM3  Foreign             an unknown process                               -       2026-09-21T14:13:20Z
            gpu-5   GPU-5   NVIDIA H100 80GB HBM3  Foreign             pod default/killed (ended, its process runs on)  -       2026-09-21T14:13:20Z
            gpu-6   GPU-6   NVIDIA H100 80GB HBM3  Foreign             claim train/llm (ended, its process runs on)     -       2026-09-21T14:13:20Z
            gpu-7   GPU-7   NVIDIA H100 80GB HBM3  Foreign             perhaps pod default/old                          -       2026-09-21T14:13:20Z
            gpu-8   GPU-8   NVIDIA H100 80GB HBM3  FreeLegacy          -                                                legacy  -
            gpu-9   GPU-9   NVIDIA H100 80GB HBM3  FreeDra             -                                                dra     -
            gpu-10  GPU-10  NVIDIA H100 80GB HBM3  Lost                -                                                dra     -

            The kubelet's id GPU-9 stands for gpu-1 (GPU-1) now.

            what limits the node:
              NvmlAnswering since 2026-09-21T14:13:22Z: no library: libnvidia-ml.so.1
              NoStatusRight since 2026-09-21T14:13:22Z: the right to patch nodes/status is missing
        "#]].assert_eq(&describe(&page));
    }

    #[test]
    fn a_mode_that_closes_a_face_names_whom_it_waits_for() {
        let golden = include_str!("../../../tests/golden/status.json");
        let mut page: StatusPage = serde_json::from_str(golden).unwrap();
        let waits = |page: &StatusPage| {
            let lines = unfinished(page).map(|line| line.trim_start().to_owned() + "\n");
            lines.collect::<String>()
        };
        assert_eq!(waits(&page), "", "mode both closes nothing");
        page.mode = "dra".to_owned();
        page.units[8].state = "Moving".to_owned();
        expect![[r#"
              the end of a counted pod (not seen yet), which has gpu-0 through legacy since 2026-09-21T14:13:20Z
              the end of pod default/counted, which has gpu-1 through legacy since 2026-09-21T14:13:20Z
              the move of gpu-8, which somebody may still have been promised
        "#]].assert_eq(&waits(&page));
        page.mode = "legacy".to_owned();
        page.units[8].state = "FreeLegacy".to_owned();
        expect![[r#"
              the end of claim train/llm, which has gpu-2 through dra since 2026-09-21T14:13:20Z
              the end of claim train/llm, which has gpu-3 through dra since 2026-09-21T14:13:20Z
        "#]]
        .assert_eq(&waits(&page));
    }

    #[test]
    fn what_limits_the_node_is_told_below_the_table_until_nothing_does() {
        let golden = include_str!("../../../tests/golden/status.json");
        let mut page: StatusPage = serde_json::from_str(golden).unwrap();
        assert!(describe(&page).contains("what limits the node:"));
        // A daemon from before `limits` says `ok` alone.
        for condition in &mut page.conditions {
            condition.limits = false;
            condition.reason = None;
        }
        let told = describe(&page);
        assert!(told.contains("  NvmlAnswering since"), "{told}");
        for condition in &mut page.conditions {
            condition.ok = true;
        }
        assert!(!describe(&page).contains("what limits the node"));
    }
}
