//! The program as a shell sees it: what it prints, and how it ends.
#![allow(
    clippy::unwrap_used,
    reason = "a program that cannot be started has to fail the test"
)]

use std::process::{Command, Output};

/// Where a ledger of an earlier version is kept for all tests.
const LEDGER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tests/golden/ledger-v1.json"
);

/// Runs the program with nothing of our own environment that it reads.
fn gpu_bridge(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-bridge"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("GPU_BRIDGE_") || name == "NODE_NAME" {
            command.env_remove(name);
        }
    }
    command.args(arguments).envs(variables.iter().copied());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn wrong_flags_end_with_2_and_each_is_named() {
    let output = gpu_bridge(
        &["run", "--cdi-dir=cdi"],
        &[("GPU_BRIDGE_HTTP_ADDR", "here")],
    );
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    for flag in ["--node-name", "--cdi-dir \"cdi\"", "--http-addr \"here\""] {
        assert!(said.contains(flag), "{flag} is missing in: {said}");
    }
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn a_flag_that_is_none_ends_with_2() {
    let output = gpu_bridge(&["run", "--gpus=8"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--gpus"));
}

#[test]
fn a_log_filter_that_is_none_is_not_ignored() {
    let output = gpu_bridge(&["ledger", "show", LEDGER], &[("GPU_BRIDGE_LOG", "a=b=c")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("GPU_BRIDGE_LOG \"a=b=c\""));
}

#[test]
fn status_without_a_daemon_ends_with_1_and_names_the_socket() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let output = gpu_bridge(&["status"], &[("GPU_BRIDGE_STATE_DIR", folder)]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains(&format!("{folder}/admin.sock")), "{said}");
}

#[test]
fn a_probe_asks_the_daemon_of_its_pod_and_ends_with_1_when_it_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let variables = [
        ("GPU_BRIDGE_STATE_DIR", folder),
        ("GPU_BRIDGE_POD_UID", "4f2"),
    ];
    let output = gpu_bridge(&["probe", "readyz"], &variables);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains(&format!("{folder}/admin-4f2.sock")), "{said}");
}

#[test]
fn a_ledger_is_shown_on_standard_output() {
    let output = gpu_bridge(&["ledger", "show", LEDGER], &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("claim train/claim-p"));
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn a_damaged_ledger_ends_with_1_and_says_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ledger.json");
    let whole = std::fs::read_to_string(LEDGER).unwrap();
    std::fs::write(
        &file,
        whole.replace("\"generation\": 42", "\"generation\": 43"),
    )
    .unwrap();
    let output = gpu_bridge(&["ledger", "show", folder.path().to_str().unwrap()], &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("is damaged: its content has the checksum"),
        "{said}"
    );
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn a_configuration_is_checked_and_explained() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        gpu_bridge(&["check-config", file.to_str().unwrap()], &[])
    };
    let good = check("apiVersion: gpu-bridge.dev/v1alpha1\nmode: dra\n");
    assert_eq!(good.status.code(), Some(0));
    assert!(text(&good.stdout).contains("mode             dra"));
    let bad = check("apiVersion: gpu-bridge.dev/v1alpha1\nmode: claims\nlimit: 3\n");
    assert_eq!(bad.status.code(), Some(2));
    let said = text(&bad.stderr);
    for word in ["mode", "claims", "limit"] {
        assert!(said.contains(word), "{word} is missing in: {said}");
    }
}
