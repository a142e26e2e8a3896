//! Rules of the repository that no compiler checks: who may import whom, how long a file may be, and what must not
//! be written anywhere.
#![allow(
    clippy::unwrap_used,
    reason = "a file that cannot be read has to fail the test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Modules of `bridge/src`, and which others each may import. The table of ARCHITECTURE.md, as data.
const MODULES: [(&str, &[&str]); 21] = [
    // The verbs `ledger` and `check-config` read one file each, without a daemon.
    (
        "cli",
        &["daemon", "admin", "client", "store", "config", "migrate"],
    ),
    // What the verbs `plan` and `switch` do, without a daemon.
    ("migrate", &["admin", "client", "config", "dra", "usage"]),
    (
        "daemon",
        &[
            "admin",
            "arbiter",
            "cdi",
            "cli",
            "client",
            "config",
            "device_plugin",
            "dra",
            "events",
            "folders",
            "follow",
            "inventory",
            "metrics",
            "migrate",
            "rivals",
            "steps",
            "store",
            "ticks",
            "uds",
            "usage",
        ],
    ),
    ("arbiter", &["store", "cdi", "metrics", "steps"]),
    // Empty in the product.
    ("steps", &[]),
    ("store", &["steps"]),
    // The durable replacement of a file is in `store`.
    ("cdi", &["store"]),
    ("inventory", &["metrics", "ticks"]),
    ("config", &["folders", "follow", "metrics"]),
    (
        "device_plugin",
        &["arbiter", "folders", "follow", "uds", "metrics"],
    ),
    (
        "dra",
        &["arbiter", "folders", "follow", "ticks", "uds", "metrics"],
    ),
    // Whatever the files are.
    ("folders", &["ticks"]),
    // List and watch of whatever kind: it names no object.
    ("follow", &[]),
    ("client", &["follow"]),
    ("usage", &["arbiter", "follow", "ticks", "uds"]),
    ("rivals", &["arbiter", "folders", "uds"]),
    ("ticks", &[]),
    ("uds", &[]),
    ("admin", &["arbiter", "metrics", "uds"]),
    ("metrics", &[]),
    ("events", &["metrics"]),
];

/// The only crates that `bridge-core` may name.
const CORE_CRATES: [&str; 2] = ["std", "thiserror"];

/// A file that does not fit on a few screens has two subjects.
const FILE_LINES: usize = 800;

/// A function that does not fit on one screen does two things. A test tells one story, and may take longer.
const FUNCTION_LINES: usize = 70;

/// Functions that may be longer, since they are lists.
const LISTS: [(&str, &str); 1] = [
    // One sentence per refusal.
    ("bridge/core/src/refusal.rs", "fmt"),
];

/// Code that is made by a generator, and folders that are not ours or not kept.
const SKIPPED: [&str; 5] = ["target", ".git", "generated", "bin", "state"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// Every file below a folder whose name has one of the ends; all files if there is none.
fn files(folder: &Path, ends: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let name = entry.file_name();
        if kind.is_dir() {
            if !SKIPPED.iter().any(|skipped| name == *skipped) {
                found.extend(files(&path, ends));
            }
        } else if kind.is_file()
            && (ends.is_empty()
                || path
                    .extension()
                    .is_some_and(|end| ends.iter().any(|e| end == *e)))
        {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The lines of a Rust file without its comments.
fn code(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The files of a crate that are in the product: tests may name what they like.
fn product(folder: &str) -> Vec<PathBuf> {
    let folder = root().join(folder);
    let is_test = |file: &PathBuf| {
        let inside = file.strip_prefix(&folder).unwrap().to_str().unwrap();
        inside.contains("tests/") || inside.ends_with("tests.rs")
    };
    let mut files = files(&folder, &["rs"]);
    files.retain(|file| !is_test(file));
    files
}

/// The code of a file without its tests, which stand last.
fn product_code(file: &Path) -> String {
    let code = code(file);
    match code.split_once("#[cfg(test)]\nmod tests {") {
        Some((product, _)) => product.to_owned(),
        None => code,
    }
}

/// The first names of the paths behind a prefix: `a` and `b` for `crate::a::x` and `crate::{b::y, …}`.
fn names_behind(code: &str, prefix: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(prefix) {
        let own_word = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        if !own_word {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            None => names.extend(first_name(rest)),
            Some(list) => names.extend(top_names(list)),
        }
    }
    names
}

fn first_name(text: &str) -> Option<String> {
    let word: String = text
        .trim_start()
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    (!word.is_empty()).then_some(word)
}

/// The first name of each entry of a `use` list whose opening brace is already read.
fn top_names(list: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut depth = 0;
    let mut start = 0;
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.extend(first_name(&list[start..at]));
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

/// The module of `bridge/src` that a file belongs to.
fn module_of(file: &Path) -> String {
    let inside = file.strip_prefix(root().join("bridge/src")).unwrap();
    let first = inside.components().next().unwrap();
    first
        .as_os_str()
        .to_str()
        .unwrap()
        .trim_end_matches(".rs")
        .to_owned()
}

#[test]
fn modules_import_only_what_the_table_allows() {
    let table: BTreeMap<&str, &[&str]> = MODULES.into_iter().collect();
    let mut breaches = Vec::new();
    for file in product("bridge/src") {
        let module = module_of(&file);
        if module == "main" || module == "lib" {
            continue;
        }
        let allowed = table
            .get(module.as_str())
            .unwrap_or_else(|| panic!("module {module} has no row in the table"));
        let code = product_code(&file);
        // `super::` leads out of a module from its `mod.rs`; from a file beside that it names a neighbour.
        let neighbour = |name: &String| {
            file.with_file_name(format!("{name}.rs")).exists()
                || !file.ends_with("mod.rs") && file.with_file_name(name).exists()
        };
        let outer = names_behind(&code, "super::").into_iter();
        let named = names_behind(&code, "crate::")
            .into_iter()
            .chain(outer.filter(|name| !neighbour(name)))
            .filter(|name| table.contains_key(name.as_str()) && *name != module);
        for name in named.filter(|name| !allowed.contains(&name.as_str())) {
            breaches.push(format!("{} imports {name}", file.display()));
        }
    }
    assert!(breaches.is_empty(), "{}", breaches.join("\n"));
}

#[test]
fn the_table_has_a_row_for_every_module_and_no_other() {
    let lib = code(&root().join("bridge/src/lib.rs"));
    let declared = names_behind(&lib, "pub mod ");
    let rows: BTreeSet<String> = MODULES.iter().map(|(name, _)| (*name).to_owned()).collect();
    let missing: Vec<_> = declared.difference(&rows).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let undeclared: Vec<_> = rows.difference(&declared).collect();
    assert!(undeclared.is_empty(), "{undeclared:?}");
}

#[test]
fn kubernetes_and_protobuf_types_stop_where_they_are_translated() {
    let mut breaches = Vec::new();
    for file in product("bridge/src") {
        let inside = file.strip_prefix(root().join("bridge/src")).unwrap();
        let text = inside.to_str().unwrap();
        let kubernetes = [
            "admin/access",
            "config/map",
            "config/profile",
            "daemon/classes",
            "daemon/doctor",
            "daemon/nodes",
            "device_plugin/node_status",
            "dra/claims",
            "dra/slices",
            "events/writer",
            "migrate/cluster",
            "usage/pending",
            "usage/pods",
        ]
        .iter()
        .any(|allowed| text.starts_with(allowed));
        if !kubernetes && product_code(&file).contains("k8s_openapi::") {
            breaches.push(format!("{text} names Kubernetes types"));
        }
        let yaml = ["config", "cdi/driver/imported"];
        let yaml = yaml.iter().any(|allowed| text.starts_with(allowed));
        if !yaml && product_code(&file).contains("serde_yaml::") {
            breaches.push(format!("{text} names serde_yaml"));
        }
        // Tests alone have it: Cargo.toml gives it to them and not to the product.
        if product_code(&file).contains("kube::runtime") {
            breaches.push(format!("{text} names kube::runtime"));
        }
    }
    assert!(breaches.is_empty(), "{}", breaches.join("\n"));
}

#[test]
fn only_the_arbiter_changes_the_pool() {
    for file in product("bridge/src") {
        let changes = ["&mut Pool", "let mut pool", ".commit("]
            .iter()
            .any(|word| product_code(&file).contains(word));
        assert!(
            !changes || module_of(&file) == "arbiter",
            "{} changes the pool",
            file.display()
        );
    }
}

#[test]
fn the_core_waits_for_nothing_and_knows_nobody() {
    for file in product("bridge/core/src") {
        let code = product_code(&file);
        for word in [".await", "async ", "std::fs", "std::net", "::now()"] {
            assert!(!code.contains(word), "{} has {word:?}", file.display());
        }
        for line in code.lines().filter(|line| line.starts_with("use ")) {
            let name = first_name(&line["use ".len()..]).unwrap();
            let own = ["crate", "self", "super"].contains(&name.as_str());
            assert!(
                own || CORE_CRATES.contains(&name.as_str()),
                "{}: {line}",
                file.display()
            );
        }
    }
    let manifest = std::fs::read_to_string(root().join("bridge/core/Cargo.toml")).unwrap();
    let (_, rest) = manifest.split_once("\n[dependencies]\n").unwrap();
    let needs: Vec<&str> = rest
        .lines()
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.trim().is_empty())
        .collect();
    assert_eq!(needs, ["thiserror.workspace = true"]);
}

/// Canonical forms of pools are for the model in `tests/model`, which asks for them by a feature of the core.
#[test]
fn the_product_does_not_ask_for_what_only_the_model_needs() {
    let line = |manifest: &str| {
        let text = std::fs::read_to_string(root().join(manifest)).unwrap();
        let mut lines = text.lines().filter(|line| line.starts_with("bridge-core"));
        lines.next().map(str::to_owned)
    };
    let plain = Some("bridge-core = { path = \"bridge/core\" }".to_owned());
    assert_eq!(line("Cargo.toml"), plain);
    let inherited = Some("bridge-core.workspace = true".to_owned());
    assert_eq!(line("bridge/Cargo.toml"), inherited);
}

/// Steps at which a daemon kills itself are for the tests of its package, which asks itself for them.
#[test]
fn the_product_has_no_step_at_which_it_kills_itself() {
    let manifest = std::fs::read_to_string(root().join("bridge/Cargo.toml")).unwrap();
    let section = |name: &str| {
        let (_, rest) = manifest.split_once(&format!("\n[{name}]\n")).unwrap();
        rest.split("\n[").next().unwrap()
    };
    let features = section("features");
    let default = features.lines().find(|line| line.starts_with("default"));
    assert_eq!(default, Some("default = [\"tls\"]"));
    assert!(section("dev-dependencies").contains("kill-points"));
    let named = manifest.lines().filter(|line| line.contains("kill-points"));
    assert_eq!(named.count(), 2, "the feature itself and who asks for it");
    for file in files(&root(), &["toml", "sh", "yaml", "yml"]) {
        let asks = std::fs::read_to_string(&file)
            .unwrap()
            .contains("kill-points");
        assert!(
            !asks || file.ends_with("bridge/Cargo.toml"),
            "{}",
            file.display()
        );
    }
    for name in ["Makefile", "manifests/Dockerfile"] {
        let text = std::fs::read_to_string(root().join(name)).unwrap();
        assert!(
            !text.contains("kill-points") && !text.contains("all-features"),
            "{name}"
        );
    }
    for file in product("bridge/src") {
        let names = product_code(&file).contains("kill-points");
        assert!(!names || file.ends_with("steps.rs"), "{}", file.display());
    }
}

/// Files of the product that read the wall clock, and what for. None of them decides by it.
const WALL_CLOCK: [(&str, &str); 10] = [
    (
        "bridge/src/admin/conditions.rs",
        "when a condition changed, for the page",
    ),
    (
        "bridge/src/arbiter/rehearsal.rs",
        "when a hold began, for the page",
    ),
    (
        "bridge/src/arbiter/task.rs",
        "when a hold began, for the page and the ledger",
    ),
    (
        "bridge/src/cli/rebuild.rs",
        "the name under which a bad ledger is kept",
    ),
    (
        "bridge/src/cli/status.rs",
        "which times are of today, for the table",
    ),
    (
        "bridge/src/device_plugin/register.rs",
        "the name of a socket",
    ),
    (
        "bridge/src/dra/wire.rs",
        "when the health of a device was told, for the kubelet",
    ),
    (
        "bridge/src/events/writer.rs",
        "when an event happened, for those who read it",
    ),
    (
        "bridge/src/metrics/mod.rs",
        "when something happened last, for the page",
    ),
    (
        "bridge/src/store/history.rs",
        "when something happened, for people",
    ),
];

#[test]
fn the_wall_clock_is_stored_and_shown_and_nothing_is_decided_by_it() {
    let mut readers = BTreeSet::new();
    let folders = ["bridge/src", "bridge/core/src", "bridge/nvml/src"];
    for file in folders.into_iter().flat_map(product) {
        let inside = file
            .strip_prefix(root())
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned();
        let code = product_code(&file);
        if code.contains("SystemTime::now") || code.contains("Timestamp::now") {
            readers.insert(inside.clone());
        }
        // What is compiled for tests and the model alone takes the times out.
        if !inside.starts_with("bridge/core/") || inside.ends_with("/canonical.rs") {
            continue;
        }
        // In the core a time of the wall clock goes into a hold or a fault and nowhere else.
        for line in code
            .lines()
            .filter(|line| line.contains(".wall") || line.contains("hold.since"))
        {
            let stored = ["Hold::exclusive(", "Fault::begun("];
            let is_stored = stored.iter().any(|made| line.contains(made));
            assert!(is_stored, "{inside}: {line}");
        }
    }
    let allowed: BTreeSet<String> = WALL_CLOCK
        .iter()
        .map(|(file, _)| (*file).to_owned())
        .collect();
    assert_eq!(readers, allowed);
}

#[test]
fn no_file_and_no_function_is_too_long_to_be_read() {
    let mut breaches = Vec::new();
    for file in files(&root(), &["rs", "go", "sh"]) {
        let text = std::fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > FILE_LINES {
            breaches.push(format!("{}: {} lines", file.display(), lines.len()));
        }
        let inside = file.strip_prefix(root()).unwrap().to_str().unwrap();
        let is_test = inside.contains("tests/") || inside.ends_with("tests.rs");
        if inside.ends_with(".rs") && !is_test {
            breaches.extend(long_functions(inside, &lines));
        }
    }
    assert!(breaches.is_empty(), "{}", breaches.join("\n"));
}

/// Functions longer than [`FUNCTION_LINES`], by the layout that rustfmt gives them: the closing brace stands below
/// the first letter of the head.
fn long_functions(file: &str, lines: &[&str]) -> Vec<String> {
    let mut long = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let head = line.trim_start();
        let words = head.split(['(', '<']).next().unwrap_or_default();
        let mut words = words.split_whitespace().rev();
        let (Some(name), Some("fn")) = (words.next(), words.next()) else {
            continue;
        };
        if head.starts_with("//") || LISTS.contains(&(file, name)) {
            continue;
        }
        let end = format!("{}}}", &line[..line.len() - head.len()]);
        let Some(length) = lines[start..].iter().position(|line| **line == end) else {
            continue;
        };
        if length >= FUNCTION_LINES {
            long.push(format!("{file}: {name} has {} lines", length + 1));
        }
    }
    long
}

#[test]
fn nothing_names_the_machine_that_it_was_written_on() {
    let root = root();
    let here = root.to_str().unwrap();
    // Hosts of image registries would tie the product to one of them: who installs it chooses.
    let hosts = [
        "gcr.io",
        "ghcr.io",
        "docker.io",
        "nvcr.io",
        "registry.k8s.io",
    ];
    for file in files(&root, &[]) {
        let Ok(text) = std::fs::read_to_string(&file) else {
            continue;
        };
        if file.ends_with(file!()) || file.file_name().is_some_and(|name| name == ".git") {
            continue;
        }
        // A short path, such as /src, may stand in a text by chance.
        let here_is_a_name = root.components().count() > 2;
        assert!(
            !(here_is_a_name && text.contains(here)),
            "{} names {here}",
            file.display()
        );
        for host in hosts {
            assert!(!text.contains(host), "{} names {host}", file.display());
        }
    }
}

/// The rows of the table below a heading of ARCHITECTURE.md, each as its cells.
fn rows(heading: &str, columns: usize) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, below) = text.split_once(heading).unwrap();
    let rows = rows_of(below, columns);
    assert!(!rows.is_empty(), "no table below {heading:?}");
    rows
}

/// The rows of the first table of a text, each as its cells.
fn rows_of(text: &str, columns: usize) -> Vec<Vec<String>> {
    let table = text
        .lines()
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim_matches('|').split(" | ");
        inner.map(|cell| cell.trim().to_owned()).collect()
    };
    let rows: Vec<Vec<String>> = table.skip(2).map(cells).collect();
    for row in &rows {
        assert_eq!(row.len(), columns, "{row:?}");
    }
    rows
}

/// The words in backticks.
fn quoted(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_table_of_modules_in_the_documentation_is_this_one() {
    let everything: BTreeSet<String> = MODULES
        .iter()
        .map(|(name, _)| (*name).to_owned())
        .filter(|name| name != "daemon")
        .collect();
    let documented: BTreeMap<String, BTreeSet<String>> = rows("Modules of `bridge/src`", 3)
        .into_iter()
        .map(|row| {
            let allowed = match row[2].as_str() {
                "all" => everything.clone(),
                "none" => BTreeSet::new(),
                list => quoted(list).into_iter().collect(),
            };
            (quoted(&row[0]).remove(0), allowed)
        })
        .collect();
    let checked: BTreeMap<String, BTreeSet<String>> = MODULES
        .iter()
        .map(|(name, allowed)| {
            let allowed = allowed.iter().map(|name| (*name).to_owned());
            ((*name).to_owned(), allowed.collect())
        })
        .collect();
    assert_eq!(documented, checked);
}

/// The names among those in backticks of a cell that no test and no scenario has.
fn missing_tests(cell: &str, code: &str) -> Vec<String> {
    let scenarios = root().join("tests/scenarios");
    let mut named = quoted(cell);
    named.retain(|name| {
        let exists = if name.ends_with(".txt") {
            scenarios.join(name).exists()
        } else {
            code.contains(&format!("fn {name}("))
        };
        !exists
    });
    named
}

fn all_code() -> String {
    let files = files(&root(), &["rs"]);
    files.iter().map(|file| code(file)).collect()
}

#[test]
fn every_test_that_guards_an_invariant_exists() {
    let code = all_code();
    let mut missing = Vec::new();
    for row in rows("## Invariants", 3) {
        assert!(!quoted(&row[2]).is_empty(), "nothing guards {:?}", row[1]);
        missing.extend(missing_tests(&row[2], &code));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_complaint_has_its_tests() {
    let text = std::fs::read_to_string(root().join("tests/COMPLAINTS.md")).unwrap();
    let code = all_code();
    let mut missing = Vec::new();
    for section in text.split("\n## ").skip(1) {
        let rows = rows_of(section, 4);
        assert!(!rows.is_empty(), "no table in {section}");
        for row in rows {
            assert!(row[0].contains("](https://"), "no source: {row:?}");
            assert!(!quoted(&row[3]).is_empty(), "no test: {row:?}");
            missing.extend(missing_tests(&row[3], &code));
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
