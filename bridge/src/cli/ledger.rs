//! `gpu-bridge ledger`: what the file says that survives a restart, and a new one for one that can't be used.

use std::path::PathBuf;

use bridge_core::{Access, Ledger, UnitId, UnitRecord};
use clap::{Args, Subcommand, ValueEnum};

use super::overview::{holder, seconds};
use super::rebuild::RebuildArgs;
use super::socket::{SocketArgs, StateArgs};
use super::table::{LINE, Table, wrap};
use crate::admin::{self, ClearFaultRequest, HoldPage, ReleaseRequest};
use crate::store::{self, Event, Inspected, inspect};

/// The verbs of `ledger`.
#[derive(Debug, Clone, Args)]
pub struct LedgerArgs {
    /// What to do with it.
    #[command(subcommand)]
    command: LedgerCommand,
}

/// The verbs of `ledger`.
#[derive(Debug, Clone, Subcommand)]
pub enum LedgerCommand {
    /// Checks the file and shows what it says. It changes nothing, and may be used while the daemon runs.
    Show {
        /// The ledger's file, or the folder of --state-dir.
        #[arg(value_name = "FILE|DIR")]
        path: PathBuf,
    },
    /// Shows the last 1,000 changes of holds and refusals, over restarts, the newest last. It needs no daemon.
    History(HistoryArgs),
    /// Ends what holds a GPU, when you know that nobody has it any more and nothing shows that to the daemon.
    ///
    /// It is refused while the kubelet or the API shows the holder, and while NVML shows a process.
    Release(ReleaseArgs),
    /// Offers a GPU again that an error (XID) of it has closed, when you know that it is well: after a reset, with a driver
    /// that does not say what has to be done.
    ClearFault(ClearFaultArgs),
    /// Sets aside a ledger that can't be used, so that the next start finds out anew who has which GPU, from the
    /// kubelet, the API server and NVML. Tells beforehand what it will find, and what it can't know.
    ///
    /// It takes the flags of `run`; in the daemon's own container none is needed.
    Rebuild(Box<RebuildArgs>),
}

/// The flags of `ledger history`.
#[derive(Debug, Clone, Args)]
pub struct HistoryArgs {
    #[command(flatten)]
    folder: StateArgs,
    /// Shows so many at most.
    #[arg(long, short = 'n', value_name = "NUMBER", default_value_t = store::HISTORY_KEPT)]
    last: usize,
    /// How they are written.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
}

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Output {
    /// A line for each, with its sentence below it.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// The flags of `ledger release`.
#[derive(Debug, Clone, Args)]
pub struct ReleaseArgs {
    /// Exact UUID of the GPU, as in `gpu-bridge status -o wide`.
    #[arg(value_name = "UUID")]
    unit: String,
    /// Why, for the log and the history.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Ends the hold though a process runs on the GPU, or NVML does not say. The GPU goes to nobody until it is idle.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// The flags of `ledger clear-fault`.
#[derive(Debug, Clone, Args)]
pub struct ClearFaultArgs {
    /// Exact UUID of the GPU, as in `gpu-bridge status -o wide`.
    #[arg(value_name = "UUID")]
    unit: String,
    /// Why, for the log and the history.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    socket: SocketArgs,
}

impl HistoryArgs {
    fn show(self) -> Result<String, super::Error> {
        let folder = self.folder.path();
        let events = store::history(&folder).map_err(|source| super::Error::History {
            folder: folder.clone(),
            source,
        })?;
        let skipped = events.len().saturating_sub(self.last);
        let lines = events.iter().skip(skipped).map(|event| match self.output {
            Output::Text => in_words(event),
            Output::Json => {
                serde_json::to_string(event).expect("an event of texts and numbers is JSON") + "\n"
            }
        });
        let text: String = lines.collect();
        if text.is_empty() && self.output == Output::Text {
            return Ok(format!(
                "nothing has been written down in {} yet\n",
                folder.display()
            ));
        }
        Ok(text)
    }
}

fn in_words(event: &Event) -> String {
    let words = [
        Some(&event.what),
        event.reason.as_ref(),
        event.unit.as_ref(),
        event.who.as_ref(),
    ];
    let words: Vec<&str> = words.into_iter().flatten().map(String::as_str).collect();
    let mut line = format!(
        "{}  {:>6}  {}\n",
        seconds(&event.at),
        event.generation,
        words.join("  ")
    );
    if let Some(why) = &event.why {
        line.push_str(&format!("    {}\n", wrap(why, LINE, 4)));
    }
    line
}

impl LedgerArgs {
    /// Does what was asked; returns the text to print.
    ///
    /// # Errors
    /// The file can't be read or is damaged, or can't be set aside.
    pub(super) async fn execute(self) -> Result<String, super::Error> {
        match self.command {
            LedgerCommand::Show { path } => Ok(describe(&inspect(&path)?)),
            LedgerCommand::History(args) => args.show(),
            LedgerCommand::Release(args) => {
                let request = ReleaseRequest {
                    unit: args.unit,
                    reason: args.reason,
                    force: args.force,
                };
                let done = admin::release(&args.socket.path(), &request).await;
                Ok(done.map_err(super::Error::NotReleased)?)
            }
            LedgerCommand::ClearFault(args) => {
                let request = ClearFaultRequest {
                    unit: args.unit,
                    reason: args.reason,
                };
                let done = admin::clear_fault(&args.socket.path(), &request).await;
                Ok(done.map_err(super::Error::NotCleared)?)
            }
            LedgerCommand::Rebuild(args) => Ok(args.rebuild().await?),
        }
    }
}

fn describe(inspected: &Inspected) -> String {
    let ledger = &inspected.ledger;
    format!(
        "{}\nwhole, generation {}, written in boot {}\n\n{}{}\n{}",
        inspected.path.display(),
        ledger.generation,
        inspected.boot_id,
        units(ledger),
        faults(ledger),
        claims(ledger)
    )
}

/// Below the units: which of them an error has closed.
fn faults(ledger: &Ledger) -> String {
    let line = |(unit, record): (&UnitId, &UnitRecord)| {
        let fault = ledger.faults.get(unit)?;
        let (device, xids) = (record.device_name(), fault.numbers());
        Some(format!(
            "{device} ({unit}) is closed: the driver told of XID {xids}\n"
        ))
    };
    ledger.in_order().into_iter().filter_map(line).collect()
}

fn units(ledger: &Ledger) -> Table<7> {
    let mut table = Table::new(["GPU", "UUID", "SIDE", "PHASE", "HOLDER", "ID", "SINCE"]);
    for (unit, record) in ledger.in_order() {
        let side = record.side.as_str();
        let mut row = |phase: String, holder: String, id: String, since: String| {
            table.add([
                record.device_name().to_string(),
                unit.to_string(),
                side.to_owned(),
                phase,
                holder,
                id,
                since,
            ]);
        };
        let none = || "-".to_owned();
        let holds = ledger.holds_on(unit);
        if holds.is_empty() {
            row(none(), none(), none(), none());
        }
        for hold in holds.iter().map(HoldPage::from) {
            row(
                hold.phase.clone(),
                holder(&hold),
                hold.id.clone().unwrap_or_else(none),
                seconds(&hold.since),
            );
        }
    }
    table
}

fn claims(ledger: &Ledger) -> Table<5> {
    let mut table = Table::new(["PREPARED CLAIM", "UID", "REQUEST", "DEVICE", "ACCESS"]);
    for preparation in ledger.prepared.values() {
        for device in &preparation.devices {
            let access = match device.access {
                Access::Owner => "owner",
                Access::Admin => "admin",
            };
            table.add([
                preparation.claim.to_string(),
                preparation.claim.uid.to_string(),
                device.requests.join(","),
                device.device.to_string(),
                access.to_owned(),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use expect_test::expect;

    use super::*;

    #[test]
    fn the_golden_ledger_is_shown_in_words() {
        let golden = Path::new(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/golden/ledger-v1.json"
        ));
        let text = describe(&inspect(golden).unwrap());
        let (_, text) = text.split_once('\n').unwrap();
        expect![[r#"
            whole, generation 42, written in boot boot-1

            GPU     UUID    SIDE    PHASE     HOLDER                                            ID     SINCE
            gpu-0   GPU-0   legacy  Granted   a counted pod (not seen yet)                      GPU-0  2026-07-25T17:20:00Z
            gpu-1   GPU-1   legacy  Bound     pod train/a                                       GPU-2  2026-07-25T17:20:00Z
            gpu-2   GPU-2   legacy  Reserved  claim train/claim-r                               -      2026-07-25T17:20:00Z
            gpu-3   GPU-3   legacy  Prepared  claim train/claim-p                               -      2026-07-25T17:20:00Z
            gpu-4   GPU-4   legacy  Foreign   an unknown process                                -      2026-07-25T17:20:00Z
            gpu-5   GPU-5   legacy  Foreign   pod train/b (ended, its process runs on)          -      2026-07-25T17:20:00Z
            gpu-6   GPU-6   legacy  Foreign   a counted pod (ended, its process runs on)        -      2026-07-25T17:20:00Z
            gpu-7   GPU-7   legacy  Foreign   claim train/claim-f (ended, its process runs on)  -      2026-07-25T17:20:00Z
            gpu-8   GPU-8   legacy  Foreign   perhaps pod train/c                               -      2026-07-25T17:20:00Z
            gpu-9   MIG-9   dra     -         -                                                 -      -
            gpu-10  GPU-10  legacy  -         -                                                 -      -
            gpu-1 (GPU-1) is closed: the driver told of XID 48, 79

            PREPARED CLAIM  UID  REQUEST  DEVICE  ACCESS
            train/claim-p   p    gpus     gpu-3   owner
            train/claim-p   p    gpus     gpu-0   admin
        "#]].assert_eq(text);
    }

    #[test]
    fn an_event_is_a_line_with_its_sentence_below() {
        let event = Event {
            at: "2026-09-21T14:13:20.123Z".to_owned(),
            generation: 42,
            what: "Refused".to_owned(),
            reason: Some("UnitHeld".to_owned()),
            unit: None,
            who: Some("claim train/llm".to_owned()),
            why: Some("UnitHeld: a sentence".to_owned()),
        };
        expect![[r#"
            2026-09-21T14:13:20Z      42  Refused  UnitHeld  claim train/llm
                UnitHeld: a sentence
        "#]]
        .assert_eq(&in_words(&event));
    }

    #[test]
    fn a_folder_without_a_ledger_says_what_to_give() {
        let folder = tempfile::tempdir().unwrap();
        let error = inspect(folder.path()).unwrap_err();
        assert!(error.to_string().contains("--state-dir"), "{error}");
    }
}
