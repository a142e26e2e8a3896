//! `gpu-bridge status`: who has which GPU on this node, as the daemon here says; or what is free on all nodes.

use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use jiff::Timestamp;

use super::nodes;
use super::overview::{Look, Shape, describe};
use super::paint::Colours;
use super::socket::SocketArgs;
use super::table::LINE;
use crate::admin::{self, ClientError, StatusPage};
use crate::daemon::{self, NodePage};

/// How often `--watch` asks the daemon, which answers from memory.
const WATCH_PERIOD: Duration = Duration::from_secs(1);
/// Puts a terminal's cursor into the corner and clears what is below: ECMA-48.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// The flags of `status`.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    socket: SocketArgs,
    /// How the answer is written.
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
    /// Shows it again whenever something has changed, until it is interrupted. It stays when the daemon restarts.
    #[arg(long, short)]
    watch: bool,
    /// Shows instead what is free on each node of the cluster, with your own credentials and without asking a daemon.
    #[arg(long, conflicts_with = "watch")]
    all_nodes: bool,
    /// With --all-nodes: how to reach the API server [default: as kubectl does, or the service account of a pod].
    #[arg(long, value_name = "FILE", requires = "all_nodes")]
    kubeconfig: Option<PathBuf>,
}

/// How the answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Output {
    /// One line per hold, at most 100 characters wide.
    #[default]
    Table,
    /// The same with whole UUIDs, names and times, and the kubelet's ids.
    Wide,
    /// The page of /status; with --watch one line for each.
    Json,
}

impl StatusArgs {
    /// Asks the daemon, and writes what it says.
    ///
    /// # Errors
    /// The daemon is not there, or does not answer with a status page; with `--watch` that is shown and asked again. The
    /// answer can't be written. With `--all-nodes`: the API server does not show what is needed.
    pub(super) async fn execute(self, out: &mut impl Write) -> Result<(), super::Error> {
        if self.all_nodes {
            let nodes = daemon::all_nodes(self.kubeconfig.as_deref()).await?;
            return Ok(out.write_all(self.of_all(&nodes).as_bytes())?);
        }
        let socket = self.socket.clone().path();
        if !self.watch {
            let page = admin::status(&socket).await?;
            return Ok(out.write_all(self.text(&page).as_bytes())?);
        }
        let interrupted = tokio::signal::ctrl_c();
        tokio::select! {
            done = self.follow(&socket, out) => match done {
                // Whoever read it has seen enough.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                other => Ok(other?),
            },
            interrupted = interrupted => Ok(interrupted?),
        }
    }

    /// Writes each answer that differs from the one before. Ends with an error alone.
    async fn follow(&self, socket: &Path, out: &mut impl Write) -> io::Result<()> {
        let clear = if io::stdout().is_terminal() && self.output != Output::Json {
            CLEAR
        } else {
            ""
        };
        let mut shown = None;
        let mut ticks = tokio::time::interval(WATCH_PERIOD);
        loop {
            ticks.tick().await;
            let now = match admin::status(socket).await {
                Ok(page) => self.text(&page),
                Err(error) => self.trouble(&error),
            };
            if shown.as_ref() == Some(&now) {
                continue;
            }
            // Between two answers in a file stands an empty line.
            let before = if shown.is_some() && clear.is_empty() && self.output != Output::Json {
                "\n"
            } else {
                clear
            };
            out.write_all(format!("{before}{now}").as_bytes())?;
            out.flush()?;
            shown = Some(now);
        }
    }

    fn of_all(&self, all: &[NodePage]) -> String {
        let longest = match self.output {
            Output::Table => LINE,
            Output::Wide => usize::MAX,
            Output::Json => return nodes::json(all),
        };
        nodes::describe(all, longest, Colours::of_standard_output())
    }

    fn text(&self, page: &StatusPage) -> String {
        let shape = match self.output {
            Output::Table => Shape::Narrow,
            Output::Wide => Shape::Wide,
            Output::Json if self.watch => {
                return serde_json::to_string(page).expect(PAGE_IS_JSON) + "\n";
            }
            Output::Json => return serde_json::to_string_pretty(page).expect(PAGE_IS_JSON) + "\n",
        };
        let look = Look {
            shape,
            colours: Colours::of_standard_output(),
            now: Timestamp::now().to_string(),
        };
        describe(page, &look)
    }

    /// That the daemon can't be asked now.
    fn trouble(&self, error: &ClientError) -> String {
        match self.output {
            Output::Table | Output::Wide => format!("{error}\nIt is asked again.\n"),
            // A program waits for pages alone.
            Output::Json => String::new(),
        }
    }
}

/// Why a page can always be written.
const PAGE_IS_JSON: &str = "a page of texts and numbers is JSON";
