//! The daemon on real Kubernetes: etcd, API server, scheduler, controller manager and kubelet of `tests/cluster`,
//! a fake NVML below and a recording container runtime beside.
//!
//! What is judged is what the runtime recorded: which container had which GPU from when to when. The cluster must
//! be built first (`tests/cluster/build.sh`). Where no cluster can run, each test says so loudly and passes.

#![allow(
    missing_docs,
    unreachable_pub,
    missing_debug_implementations,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "helpers of one test program; the tests say what they show by their names"
)]

mod adoption;
mod arrivals;
mod chart;
mod churn;
mod config_map;
mod conflicts;
mod containerd;
#[path = "../../bridge/tests/common/dcgm.rs"]
mod dcgm;
mod demand;
mod demo;
mod experiments;
mod health;
#[path = "../../bridge/tests/common/http.rs"]
mod http;
mod image;
mod large;
mod lifetimes;
mod lost_race;
mod mapped;
mod monitoring;
mod nodes;
mod objects;
mod older;
mod record;
mod requests;
mod restarts;
mod rights;
mod rivals;
mod shipped;
mod sides;
mod split;
mod standin;
mod switch;
mod trouble;
mod update;
mod versions;
mod world;
