//! `gpu-bridge ledger rebuild`: a new ledger in the place of one that can't be used.
//!
//! It writes no ledger of its own. The file is set aside, and the next start takes over what runs here as after a
//! lost ledger: one way to find that out, with one set of rules. What that way would find is told beforehand, and so
//! is what it can't know.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::SystemTime;

use bridge_core::{ForeignCause, HoldKind, Report, Standing, UnitStatus};
use clap::Args;

use super::overview::holder;
use super::run::{Mistakes, RunArgs, RunOptions};
use super::table::Table;
use crate::admin::{self, HoldPage};
use crate::daemon::{self, Foresight, Preview};
use crate::store::{self, AsideError, Condition, LEDGER_FILE, NoDaemon};

/// The flags of `ledger rebuild`.
#[derive(Debug, Clone, Args)]
pub struct RebuildArgs {
    /// Only tells what a start without the ledger would take over, and what it can't know.
    #[arg(long)]
    dry_run: bool,
    /// Sets a ledger aside that can be read, because it is not this node's or too old. No daemon may run.
    #[arg(long)]
    even_if_whole: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// Why the ledger stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// Flags are wrong.
    #[error(transparent)]
    Usage(#[from] Mistakes),
    /// There is nothing to set aside.
    #[error(
        "there is no ledger {}, so nothing has to be set aside: a daemon that starts here takes over what runs. \
         Another folder: --state-dir", path.display()
    )]
    Missing {
        /// Where it would be.
        path: PathBuf,
    },
    /// It can be used.
    #[error(
        "{} is whole (generation {generation}), and a daemon that starts uses it. If it is not this node's, or an old \
         copy, stop gpu-bridge and give --even-if-whole", path.display()
    )]
    Whole {
        /// The file.
        path: PathBuf,
        /// Its generation.
        generation: u64,
    },
    /// A daemon uses it, or may.
    #[error("{owned}, and {why}: stop it first")]
    InUse {
        /// Who has it.
        owned: AsideError,
        /// What it says of its ledger.
        why: String,
    },
    /// It can't be locked or renamed.
    #[error("nothing was changed")]
    Aside(#[from] AsideError),
}

impl RebuildArgs {
    /// Sets the ledger aside, or only tells what would follow; returns the text to print.
    ///
    /// # Errors
    /// See [`RebuildError`]; nothing is changed then.
    pub(super) async fn rebuild(self) -> Result<String, RebuildError> {
        let options = self.run.check()?;
        let _kept_away = keep_daemons_away(&options).await?;
        let path = options.state_dir.join(LEDGER_FILE);
        let mut text = match store::condition(&options.state_dir) {
            Condition::Missing => return Err(RebuildError::Missing { path }),
            Condition::Whole { generation } if !self.even_if_whole && !self.dry_run => {
                return Err(RebuildError::Whole { path, generation });
            }
            Condition::Whole { generation } => {
                format!("{} is whole, generation {generation}.\n", path.display())
            }
            Condition::Unreadable { why } => format!("{} {why}.\n", path.display()),
        };
        text.push_str(&foresee(&options).await);
        let unprepared = store::unprepared(&options.state_dir).len();
        if unprepared > 0 {
            let _ = writeln!(
                text,
                "\nClaims that were unprepared while there was no ledger: {unprepared}. This stays remembered, and they hold nothing."
            );
        }
        if self.dry_run {
            text.push_str("\nNothing was changed.\n");
            return Ok(text);
        }
        let aside = store::set_aside(&options.state_dir, SystemTime::now())?;
        let _ = writeln!(
            text,
            "\nThe ledger is now {}. Keep it until everything runs as it should.\n\
             Now start gpu-bridge, or restart it if it runs: it takes over what it finds, and gives nothing out until then.",
            aside.display()
        );
        Ok(text)
    }
}

/// Keeps daemons from starting meanwhile. One that is there may stay if it can't read the ledger: it does not look at
/// the file again, and never writes it.
async fn keep_daemons_away(options: &RunOptions) -> Result<Option<NoDaemon>, RebuildError> {
    let owned = match store::keep_daemons_away(&options.state_dir) {
        Ok(kept_away) => return Ok(Some(kept_away)),
        Err(owned @ AsideError::Owned { .. }) => owned,
        Err(error @ (AsideError::Lock { .. } | AsideError::Rename { .. })) => {
            return Err(error.into());
        }
    };
    let why = match admin::status(&options.admin_socket).await {
        Ok(page) if page.standing == admin::standing(Standing::LedgerUnreadable) => {
            return Ok(None);
        }
        Ok(page) => format!("its ledger is {}", page.standing),
        Err(error) => format!("what it does with it can't be asked ({error})"),
    };
    Err(RebuildError::InUse { owned, why })
}

/// What a start without the ledger would take over, in words.
async fn foresee(options: &RunOptions) -> String {
    let unknown = |why: &str| {
        format!(
            "\nWhat a start without it would take over can't be told now: {why}.\nIt would wait for that, and give nothing out meanwhile.\n"
        )
    };
    match daemon::preview(options).await {
        Ok(Foresight::Full(preview)) => describe(&preview),
        Ok(Foresight::Waiting(missing)) => unknown(&missing),
        Err(error) => unknown(&format!("{error:#}")),
    }
}

fn describe(preview: &Preview) -> String {
    let mut table = Table::new(["GPU", "UUID", "PHASE", "HOLDER", "ID"]);
    for unit in &preview.status.units {
        let none = || "-".to_owned();
        let mut row = |phase: String, holder: String, id: String| {
            let (device, uuid) = (unit.device.to_string(), unit.unit.to_string());
            table.add([device, uuid, phase, holder, id]);
        };
        if unit.holds.is_empty() {
            row("free".to_owned(), none(), none());
        }
        for hold in unit.holds.iter().map(HoldPage::from) {
            let id = hold.id.clone().unwrap_or_else(none);
            row(hold.phase.clone(), holder(&hold), id);
        }
    }
    let mut text = format!(
        "\nWhat a start without it would take over, as things are now:\n\n{table}\nWhat it can't know:\n"
    );
    for unknown in always_unknown()
        .map(str::to_owned)
        .into_iter()
        .chain(preview.status.units.iter().filter_map(unproven))
        .chain(preview.reports.iter().filter_map(contradiction))
        .chain(preview.nameless.iter().map(|(claim, name)| {
            format!(
                "Which GPU claim {claim} has: it was given {name}, and no GPU has that name now. It can't be prepared; \
                 delete its pod and the claim, so that another GPU is allocated."
            )
        }))
    {
        let _ = writeln!(text, "- {unknown}");
    }
    text
}

/// What no source on the node or in the API keeps.
fn always_unknown() -> [&'static str; 4] {
    [
        "Since when each of them has its GPU: that is counted from the start.",
        "On which side free GPUs were: they begin with counted pods, and move from there.",
        "GPUs that do not answer now: they are missing in the list, and in the node's count, until they do.",
        "Names that differ from the minor number, as a replaced GPU has one: each GPU is named after its minor number, \
         unless a prepared claim's CDI file says otherwise.",
    ]
}

/// A unit that is closed because its holder is not proven.
fn unproven(unit: &UnitStatus) -> Option<String> {
    let name = format!("{} ({})", unit.device, unit.unit);
    unit.holds.iter().find_map(|hold| match &hold.kind {
        HoldKind::Foreign {
            cause: ForeignCause::UnknownUnitOf { pod },
        } => Some(format!(
            "Whether {name} is free: pod {pod} runs, and nothing says which GPU it has. Nobody gets {name} until that \
             pod has ended or its process shows its GPU."
        )),
        HoldKind::Foreign {
            cause: ForeignCause::UnknownProcess | ForeignCause::Lingering { .. },
        } => Some(format!(
            "Whose process runs on {name}: nobody gets {name} until it has ended."
        )),
        HoldKind::Granted { .. }
        | HoldKind::Bound { .. }
        | HoldKind::Reserved { .. }
        | HoldKind::Prepared { .. } => None,
    })
}

/// Two sources that do not agree.
fn contradiction(report: &Report) -> Option<String> {
    let Report::UnknownHolder { id, pod } = report else {
        return None;
    };
    Some(format!(
        "Which GPU pod {pod} has: the kubelet lists {id}, and the GPU behind it is somebody else's. Compare with \
         nvidia-smi in the pod."
    ))
}
