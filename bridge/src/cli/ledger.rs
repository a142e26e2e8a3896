//! `gpu-bridge ledger`: what the file says that survives a restart, and a new one for one that can't be used.

use std::path::PathBuf;

use bridge_core::{Access, Ledger};
use clap::{Args, Subcommand};

use super::rebuild::RebuildArgs;
use super::status::{holder, seconds};
use super::table::Table;
use crate::admin::HoldPage;
use crate::store::{Inspected, inspect};

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
    /// Sets aside a ledger that can't be used, so that the next start finds out anew who has which GPU, from the
    /// kubelet, the API server and NVML. Tells beforehand what it will find, and what it can't know.
    ///
    /// It takes the flags of `run`; in the daemon's own container none is needed.
    Rebuild(Box<RebuildArgs>),
}

impl LedgerArgs {
    /// Does what was asked; returns the text to print.
    ///
    /// # Errors
    /// The file can't be read or is damaged, or can't be set aside.
    pub(super) async fn execute(self) -> Result<String, super::Error> {
        match self.command {
            LedgerCommand::Show { path } => Ok(describe(&inspect(&path)?)),
            LedgerCommand::Rebuild(args) => Ok(args.rebuild().await?),
        }
    }
}

fn describe(inspected: &Inspected) -> String {
    let ledger = &inspected.ledger;
    format!(
        "{}\nwhole, generation {}, written in boot {}\n\n{}\n{}",
        inspected.path.display(),
        ledger.generation,
        inspected.boot_id,
        units(ledger),
        claims(ledger)
    )
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

            PREPARED CLAIM  UID  REQUEST  DEVICE  ACCESS
            train/claim-p   p    gpus     gpu-3   owner
            train/claim-p   p    gpus     gpu-0   admin
        "#]].assert_eq(text);
    }

    #[test]
    fn a_folder_without_a_ledger_says_what_to_give() {
        let folder = tempfile::tempdir().unwrap();
        let error = inspect(folder.path()).unwrap_err();
        assert!(error.to_string().contains("--state-dir"), "{error}");
    }
}
