//! Every reason that somebody can read in an event or in the log has a page in `migration-guide/reasons`, and every
//! page there has its reason.
#![allow(
    clippy::unwrap_used,
    reason = "a file that cannot be read has to fail the test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The parts of a page, in order.
const PARTS: [&str; 3] = ["## What happened", "## Why", "## What to do"];

/// A page is read by somebody in trouble: it has to fit on a screen, and to say enough.
const LINES: std::ops::RangeInclusive<usize> = 8..=20;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Folders of what was built or runs, which have no pages of ours.
const NOT_OURS: [&str; 3] = ["target", "bin", "state"];

/// The text of every file of a folder and those below it.
fn texts(folder: &Path, end: &str) -> BTreeMap<PathBuf, String> {
    let mut texts = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !NOT_OURS.iter().any(|name| path.ends_with(name)) {
                texts.extend(self::texts(&path, end));
            }
        } else if path.extension().is_some_and(|e| e == end) {
            let text = std::fs::read_to_string(&path).unwrap();
            texts.insert(path, text);
        }
    }
    texts
}

/// The words in quotes that look like a reason: `PascalCase`, without spaces.
fn quoted_reasons(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2).filter(|word| {
        word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_alphanumeric())
    })
}

/// The reasons that a source file gives: in a field `reason` of a log line, and in the body of a function `reason`.
fn reasons_in(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, field) in code.match_indices("reason = \"") {
        // The opening quote belongs to the word.
        let line = code[at + field.len() - 1..].lines().next().unwrap();
        found.extend(quoted_reasons(line).next().map(str::to_owned));
    }
    for (at, _) in code.match_indices("fn reason(") {
        let indent = code[..at].rsplit('\n').next().unwrap();
        let indent = &indent[..indent.len() - indent.trim_start().len()];
        let body = &code[at..];
        let end = body.find(&format!("\n{indent}}}\n")).unwrap();
        found.extend(quoted_reasons(&body[..end]).map(str::to_owned));
    }
    found
}

/// Every reason of the product, from the lists and from the source.
fn reasons() -> BTreeSet<String> {
    let listed = bridge_core::Refusal::REASONS
        .iter()
        .chain(&gpu_bridge::dra::claims::Error::REASONS);
    let mut reasons: BTreeSet<String> = listed.map(|reason| (*reason).to_owned()).collect();
    for folder in ["bridge/src", "bridge/core/src"] {
        for code in texts(&root().join(folder), "rs").values() {
            reasons.extend(reasons_in(code));
        }
    }
    reasons
}

fn pages() -> BTreeMap<String, String> {
    let pages = texts(&root().join("migration-guide/reasons"), "md").into_iter();
    pages
        .map(|(path, text)| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, text)
        })
        .collect()
}

#[test]
fn the_source_is_searched_where_reasons_are_given() {
    let code = "fn f() {\n    warn!(%id, reason = \"InALog\", \"words for people\");\n}\nimpl Why {\n    \
                fn reason(&self) -> &'static str {\n        match self {\n            Self::A => \"InAMatch\",\n        \
                }\n    }\n\n    fn other() -> &'static str {\n        \"NotOne\"\n    }\n}\n";
    let expected = ["InALog", "InAMatch"].map(str::to_owned);
    assert_eq!(reasons_in(code), BTreeSet::from(expected));
    let found = reasons();
    // One of each kind of place.
    for reason in ["UnitHeld", "ClaimGone", "NotSaved", "HandedOverBusy"] {
        assert!(found.contains(reason), "{reason} is not found: {found:?}");
    }
}

#[test]
fn every_reason_has_a_page_and_every_page_has_its_reason() {
    let pages: BTreeSet<String> = pages().into_keys().collect();
    let reasons = reasons();
    let without_page: Vec<_> = reasons.difference(&pages).collect();
    assert!(
        without_page.is_empty(),
        "without a page in migration-guide/reasons: {without_page:?}"
    );
    let without_reason: Vec<_> = pages.difference(&reasons).collect();
    assert!(
        without_reason.is_empty(),
        "pages for reasons that nobody gives: {without_reason:?}"
    );
}

#[test]
fn every_page_says_what_happened_and_why_and_what_to_do_on_one_screen() {
    for (reason, text) in pages() {
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], format!("# {reason}"));
        let heads: Vec<&str> = lines[1..]
            .iter()
            .filter(|line| line.starts_with('#'))
            .copied()
            .collect();
        assert_eq!(heads, PARTS, "{reason}");
        assert!(
            LINES.contains(&lines.len()),
            "{reason}: {} lines",
            lines.len()
        );
        for (head, next) in lines.iter().zip(&lines[1..]) {
            let is_head = head.starts_with('#');
            assert!(
                !is_head || next.is_empty(),
                "{reason}: no line below {head}"
            );
        }
        for line in lines
            .iter()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            assert!(
                line.ends_with(['.', ':', ';']),
                "{reason}: each line is a sentence: {line}"
            );
        }
        for part in text.split("## ").skip(2) {
            assert!(part.trim().lines().count() > 2, "{reason}: empty: {part}");
        }
    }
}

/// The places of a page that a link can name, as GitHub makes them of the headings.
fn anchors(text: &str) -> BTreeSet<String> {
    // Every second part is a block of code.
    let outside = text.split("```").step_by(2).flat_map(str::lines);
    let headings = outside.filter(|line| line.starts_with('#'));
    headings
        .map(|heading| {
            let words = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = words.replace(' ', "-");
            kept.chars()
                .filter(|it| it.is_alphanumeric() || "-_".contains(*it))
                .collect()
        })
        .collect()
}

/// The links of a page that lead to no file, or to no heading of one.
fn dead_links(page: &Path, text: &str) -> Vec<String> {
    let outside = text.split("```").step_by(2).collect::<String>();
    let links = outside.split("](").skip(1);
    let links = links.filter_map(|link| link.split(')').next());
    links
        .filter(|link| !link.contains("://"))
        .filter(|link| {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if target.is_empty() {
                page.to_owned()
            } else {
                page.parent().unwrap().join(target)
            };
            let has_anchor = || {
                let text = std::fs::read_to_string(&target);
                text.is_ok_and(|text| anchors(&text).contains(anchor))
            };
            !target.exists() || !anchor.is_empty() && !has_anchor()
        })
        .map(|link| format!("{}: {link}", page.display()))
        .collect()
}

#[test]
fn every_link_of_the_documentation_leads_somewhere() {
    let mut documents = BTreeMap::new();
    for folder in ["migration-guide", "tests", "fuzz", "manifests"] {
        documents.extend(texts(&root().join(folder), "md"));
    }
    for entry in std::fs::read_dir(root()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "md") {
            let text = std::fs::read_to_string(&path).unwrap();
            documents.insert(path, text);
        }
    }
    assert!(documents.len() > 40, "{:?}", documents.keys());
    let dead = documents
        .iter()
        .flat_map(|(page, text)| dead_links(page, text));
    let dead: Vec<String> = dead.collect();
    assert!(dead.is_empty(), "{dead:#?}");
}

#[test]
fn a_link_to_no_file_and_to_no_heading_is_seen() {
    let readme = root().join("README.md");
    for (link, is_dead) in [
        ("ARCHITECTURE.md", false),
        ("ARCHITECTURE.md#invariants", false),
        ("#what-it-does-not-promise", false),
        ("https://example.org/#x", false),
        ("ARCHITEKTUR.md", true),
        ("ARCHITECTURE.md#invariance", true),
        ("#what-it-does-promise-not", true),
    ] {
        let dead = dead_links(&readme, &format!("see [this]({link})"));
        assert_eq!(dead.len(), usize::from(is_dead), "{link}");
    }
}
