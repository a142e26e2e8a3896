//! The whole daemon as a process of its own, without Kubernetes: the real binary between testkit's kubelet and API
//! server and a fake NVML, everything in a temporary folder.
//!
//! What is judged here is what nobody sees in a part alone: starts without this or that, ends of every kind, and
//! trouble of which the daemon must not die, and from which it must come back by itself.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that meets what it does not expect shall panic, and say what it saw"
)]

mod adoption;
mod bench;
mod calls;
mod claims;
mod classes;
mod clock;
mod config_map;
mod costs;
#[path = "../common/dcgm.rs"]
mod dcgm;
#[path = "../../../tests/e2e/churn/dice.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "it belongs to the churn of tests/e2e, which needs more of it"
)]
mod dice;
mod disk;
mod doctor;
mod end;
mod events;
mod faults;
mod gpus;
#[path = "../common/h100.rs"]
mod h100;
#[path = "../common/http.rs"]
mod http;
mod idle;
mod kills;
mod kubelet;
mod ledger;
mod live;
mod log;
mod metrics;
mod mistakes;
mod modes;
mod monitoring;
mod peers;
mod privileges;
mod process;
mod profiles;
mod rebuild;
mod restart_time;
mod restarts;
mod rivals;
mod secrets;
mod slices;
mod soak;
mod start;
mod switch;
#[path = "../../../tests/testkit/tests/toys/mod.rs"]
mod toys;
mod update;
mod verbs;
mod wiring;
mod world;
