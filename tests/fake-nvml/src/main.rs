//! Makes and changes fake nodes from a shell.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fake_nvml::{FakeNode, Fault, Scenario};

/// A fake node with an NVIDIA driver and no hardware.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Lay out a node: scenario, library, dev, proc and sys; prints the path of the library.
    Mkroot {
        /// The scenario.
        #[arg(long)]
        scenario: PathBuf,
        /// The folder of the node.
        folder: PathBuf,
    },
    /// Print index, UUID, PCI bus id and product name of each GPU.
    Gpus {
        /// The folder of the node.
        folder: PathBuf,
    },
    /// A GPU falls off the bus.
    Lose {
        /// The folder of the node.
        folder: PathBuf,
        /// Its UUID.
        gpu: String,
    },
    /// A lost GPU is back.
    Find {
        /// The folder of the node.
        folder: PathBuf,
        /// Its UUID.
        gpu: String,
    },
    /// The driver reports an XID error of a GPU.
    Xid {
        /// The folder of the node.
        folder: PathBuf,
        /// Its UUID.
        gpu: String,
        /// The number of the error.
        xid: u64,
    },
    /// The driver says what has to be done about a GPU.
    Recovery {
        /// The folder of the node.
        folder: PathBuf,
        /// Its UUID.
        gpu: String,
        /// A number of nvmlDeviceGpuRecoveryAction_t: 0 nothing, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset.
        action: u32,
    },
    /// An NVML call goes wrong.
    Fault {
        /// The folder of the node.
        folder: PathBuf,
        /// The name of the call.
        call: String,
        /// The nvmlReturn_t that it answers.
        #[arg(long)]
        error: Option<u32>,
        /// How many calls go well before.
        #[arg(long, default_value_t = 0)]
        skip: u32,
        /// How many calls are hit; all if not given.
        #[arg(long)]
        times: Option<u32>,
        /// How long the call takes.
        #[arg(long, default_value_t = 0)]
        delay_ms: u64,
    },
    /// An NVML call goes well again.
    Clear {
        /// The folder of the node.
        folder: PathBuf,
        /// The name of the call.
        call: String,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().verb) {
        Ok(text) => {
            say(&mut std::io::stdout(), &text);
            ExitCode::SUCCESS
        }
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            say(&mut std::io::stderr(), &text);
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<String, Box<dyn std::error::Error>> {
    Ok(match verb {
        Verb::Mkroot { scenario, folder } => {
            let node = FakeNode::create(&folder, &Scenario::load(&scenario)?)?;
            node.library().display().to_string()
        }
        Verb::Gpus { folder } => FakeNode::open(&folder)?
            .gpus()
            .iter()
            .map(|gpu| format!("{} {} {} {}", gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.name))
            .collect::<Vec<_>>()
            .join("\n"),
        Verb::Lose { folder, gpu } => {
            FakeNode::open(&folder)?.lose(&gpu)?;
            String::new()
        }
        Verb::Find { folder, gpu } => {
            FakeNode::open(&folder)?.find_again(&gpu)?;
            String::new()
        }
        Verb::Xid { folder, gpu, xid } => {
            FakeNode::open(&folder)?.report_xid(&gpu, xid)?;
            String::new()
        }
        Verb::Recovery {
            folder,
            gpu,
            action,
        } => {
            FakeNode::open(&folder)?.set_recovery(&gpu, action)?;
            String::new()
        }
        Verb::Fault {
            folder,
            call,
            error,
            skip,
            times,
            delay_ms,
        } => {
            let fault = Fault {
                error,
                skip,
                times,
                delay_ms,
            };
            FakeNode::open(&folder)?.set_fault(&call, &fault)?;
            String::new()
        }
        Verb::Clear { folder, call } => {
            FakeNode::open(&folder)?.clear_fault(&call)?;
            String::new()
        }
    })
}

fn say(stream: &mut dyn std::io::Write, text: &str) {
    if !text.is_empty() {
        // A closed pipe has nobody to tell.
        let _ = writeln!(stream, "{text}");
    }
}
