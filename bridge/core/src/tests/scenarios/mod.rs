//! Scripts an admin can read, run against the core: `tests/scenarios/*.txt`, explained in the README there.

mod node;
mod words;

use std::path::{Path, PathBuf};

use expect_test::{Expect, expect};

use node::Node;

/// The devices of a daemon in the words of a script: `on`, or how they are tainted.
pub(super) fn taints(daemon: &super::kit::Daemon) -> String {
    words::claim_offers(&daemon.pool.offers())
}

/// Fewer files than this mean that the folder was not found, or lost.
const FILES_AT_LEAST: usize = 20;

/// Runs a script; the error names the file and the line.
fn run(mut node: Node, name: &str, script: &str) -> Result<(), String> {
    for (number, line) in (1..).zip(script.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            node.run(line)
                .map_err(|why| format!("{name}:{number}: `{line}`: {why}"))?;
        }
    }
    Ok(())
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/scenarios")
}

#[expect(
    clippy::disallowed_methods,
    reason = "the scripts are read by the test, not by the core"
)]
fn scripts() -> Vec<(String, String)> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder())
        .expect("tests/scenarios is in the repository")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|end| end == "txt"))
        .collect();
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let name = path.file_name().expect("a file has a name");
            let name = format!("tests/scenarios/{}", name.to_string_lossy());
            let script = std::fs::read_to_string(&path).expect("the script can be read");
            (name, script)
        })
        .collect()
}

#[test]
fn every_scenario_ends_as_it_says() {
    let scripts = scripts();
    assert!(
        scripts.len() >= FILES_AT_LEAST,
        "only {} scripts in {}",
        scripts.len(),
        folder().display()
    );
    let failures: Vec<String> = scripts
        .iter()
        .filter_map(|(name, script)| run(Node::default(), name, script).err())
        .collect();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn every_scenario_ends_the_same_while_the_wall_clock_jumps() {
    let failures: Vec<String> = scripts()
        .iter()
        .filter_map(|(name, script)| run(Node::with_a_jumping_clock(), name, script).err())
        .collect();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn every_scenario_opens_with_what_the_admin_sees_and_expects_something() {
    for (name, script) in scripts() {
        assert!(script.starts_with("# "), "{name} opens with no comment");
        let checks = script
            .lines()
            .filter(|line| line.starts_with("expect ") || line.contains("->"))
            .count();
        assert!(checks > 0, "{name} checks nothing");
    }
}

fn check(script: &str, message: Expect) {
    let outcome = run(Node::default(), "script.txt", script);
    message.assert_eq(&outcome.err().unwrap_or_else(|| "it passed".to_owned()));
}

#[test]
fn a_line_that_nobody_understands_is_told_with_its_place() {
    check(
        "gpus 2\n\nalocate GPU-0 -> GPU-0",
        expect![
            "script.txt:3: `alocate GPU-0 -> GPU-0`: there is no command `alocate`; there are: gpus, gpu, nvml, mode, limits, pods, listed, kubelet, claims, node, waits, process, time, look, allocate, prepare, again, unprepare, crash, boot, lost-ledger, unreadable-ledger, checkpoint, dra-state, adopt, rival, xid, recovery, xids, clear-fault, expect"
        ],
    );
}

#[test]
fn a_wrong_word_in_a_known_line_is_told_with_what_it_should_be() {
    check(
        "gpus many",
        expect!["script.txt:1: `gpus many`: `many` is not a number of GPUs"],
    );
    check(
        "gpus 1\nmode all",
        expect!["script.txt:2: `mode all`: `all` is not a mode: legacy, both, dra or drained"],
    );
    check(
        "gpus 1\npods pod-a alive 1",
        expect![
            "script.txt:2: `pods pod-a alive 1`: `alive` is not a state of a pod: live N, bound N, terminal or gone"
        ],
    );
    check(
        "gpus 1\ntime 5",
        expect!["script.txt:2: `time 5`: `5` is not a time: write +11s"],
    );
    check(
        "gpus 1\nallocate GPU-0",
        expect![
            "script.txt:2: `allocate GPU-0`: what should come of it is missing: write `-> ...`"
        ],
    );
}

#[test]
fn an_outcome_that_differs_is_told_with_both() {
    check(
        "gpus 1\nmode legacy\nallocate GPU-0 -> refused NoFreeUnit",
        expect![
            "script.txt:3: `allocate GPU-0 -> refused NoFreeUnit`: expected `refused NoFreeUnit`, but it is `GPU-0`"
        ],
    );
    check(
        "gpus 1\nmode legacy\nallocate GPU-0 -> GPU-0\nexpect holds GPU-0 free",
        expect![
            "script.txt:4: `expect holds GPU-0 free`: expected `free`, but it is `Granted GPU-0`"
        ],
    );
    check(
        "gpus 1\nexpect reported HandedOverBusy",
        expect![
            "script.txt:2: `expect reported HandedOverBusy`: expected `HandedOverBusy` to be reported, but there is `UnitAdded`"
        ],
    );
}
