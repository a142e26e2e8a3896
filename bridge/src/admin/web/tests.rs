//! The page is whole, asks nobody but its daemon, and shows what `gpu-bridge status` shows.

use std::collections::BTreeSet;
use std::process::Command;

use axum::body::to_bytes;
use expect_test::{Expect, expect};

use super::*;

const HTML: &str = include_str!("index.html");
const CSS: &str = include_str!("page.css");
const JS: &str = include_str!("page.js");

/// Elements that have no end.
const VOID: [&str; 3] = ["meta", "link", "!doctype"];

/// Name and attributes of a tag.
type Tag<'a> = (&'a str, Vec<(&'a str, &'a str)>);

/// Every tag, and the text behind it. Panics where the page is not written in the plain way that this reads.
fn tags(html: &str) -> Vec<(Tag<'_>, &str)> {
    let pieces = html.split('<').skip(1);
    pieces
        .map(|piece| {
            let (tag, text) = piece.split_once('>').expect("a tag ends");
            let (name, mut rest) = tag.split_once(' ').unwrap_or((tag, ""));
            let mut attributes = Vec::new();
            while !rest.trim().is_empty() {
                let rest_of = rest.trim_start();
                let plain = rest_of.split([' ', '=']).next().unwrap();
                let behind = &rest_of[plain.len()..];
                match behind.strip_prefix("=\"") {
                    Some(value) => {
                        let (value, after) = value.split_once('"').expect("a value ends");
                        attributes.push((plain, value));
                        rest = after;
                    }
                    None => {
                        assert!(!behind.starts_with('='), "{tag}: a value has quotes");
                        attributes.push((plain, ""));
                        rest = behind;
                    }
                }
            }
            ((name, attributes), text)
        })
        .collect()
}

fn attribute<'a>((_, attributes): &Tag<'a>, name: &str) -> Option<&'a str> {
    let found = attributes.iter().find(|(key, _)| *key == name);
    found.map(|(_, value)| *value)
}

#[test]
fn every_element_ends_and_nothing_runs_that_is_not_in_the_script() {
    let mut open = Vec::new();
    for (tag, text) in tags(HTML) {
        let name = tag.0;
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "the end of {name}");
            continue;
        }
        for (key, _) in &tag.1 {
            assert!(!key.starts_with("on") && *key != "style", "{key} in {name}");
        }
        if name == "script" {
            assert_eq!(text.trim(), "", "the policy allows no script in the page");
        }
        assert_ne!(name, "style", "the policy allows no style in the page");
        if !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    assert!(HTML.starts_with("<!doctype html>\n<html lang=\"en\">"));
}

#[test]
fn what_the_page_loads_is_served_and_nothing_is_of_the_internet() {
    let served = [SCRIPT, STYLE].map(|path| path.trim_start_matches('/'));
    let all = tags(HTML);
    let loads = all
        .iter()
        .filter_map(|(tag, _)| attribute(tag, "src").or_else(|| attribute(tag, "href")));
    assert_eq!(loads.collect::<BTreeSet<_>>(), BTreeSet::from(served));
    for text in [HTML, CSS, JS] {
        for outside in ["http:", "https:", "//cdn", "@import", "url("] {
            assert!(!text.contains(outside), "{outside}");
        }
    }
    for markup in [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ] {
        assert!(!JS.contains(markup), "texts of tenants are never markup");
    }
}

#[test]
fn the_page_is_read_in_light_and_in_dark() {
    assert!(HTML.contains("name=\"color-scheme\" content=\"light dark\""));
    assert!(CSS.contains("color-scheme: light dark;"));
    // No colour of its own that one of the two would make unreadable.
    for own in ["rgb(", "hsl(", "#0", "#f", "white", "black"] {
        assert!(!CSS.contains(own), "{own}");
    }
}

#[tokio::test]
async fn each_file_says_what_it_is_and_what_it_may_do() {
    for (answer, kind, text) in [
        (page().await, "text/html; charset=utf-8", HTML),
        (script().await, "text/javascript; charset=utf-8", JS),
        (style().await, "text/css; charset=utf-8", CSS),
    ] {
        let header = |name| answer.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header("content-type"), kind);
        assert_eq!(header("x-content-type-options"), "nosniff");
        let policy = header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"));
        assert!(policy.contains("frame-ancestors 'none'"));
        assert!(!policy.contains("unsafe"), "{policy}");
        let body = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        assert_eq!(body, text.as_bytes());
    }
}

/// What the page shows of an answer, as far as a machine without a browser can tell: the script runs in Node.
fn check(code: &str, status: &str, seen: &Expect) {
    let all = tags(HTML);
    let ids: Vec<&str> = all
        .iter()
        .filter_map(|(tag, _)| attribute(tag, "id"))
        .collect();
    let program = format!("{}\n{{\n{JS}\n}}", include_str!("dom.js"));
    let run = Command::new("node")
        .args(["-e", &program])
        .env("IDS", serde_json::to_string(&ids).unwrap())
        .env("STATUS", status)
        .env("CODE", code)
        .output();
    let Ok(run) = run else {
        use std::io::Write as _;
        // Nobody is left to tell when standard error is closed.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: the script of the page: there is no node"
        );
        return;
    };
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{errors}");
    seen.assert_eq(&String::from_utf8_lossy(&run.stdout));
}

#[test]
fn the_page_shows_what_the_status_says() {
    let golden = include_str!("../../../../tests/golden/status.json");
    check(
        "200",
        golden,
        &expect![[r#"
        node: node-1
        summary: mode both, limits: legacy 5, dra none; free: 1 for counted pods, 0 for claims; ledger Serving, generation 12; version (of the build)
        trouble (hidden): 
        units: gpu-0 | GPU-0 | NVIDIA H100 80GB HBM3 | Granted | a counted pod (not seen yet) | legacy | 2026-09-21T14:13:20Z
        units: gpu-1 | GPU-1 | NVIDIA H100 80GB HBM3 | Bound | pod default/counted | legacy | 2026-09-21T14:13:20Z
        units: gpu-2 | GPU-2 | NVIDIA H100 80GB HBM3 | Reserved | claim train/llm | dra | 2026-09-21T14:13:20Z
        units: gpu-3 | GPU-3 | NVIDIA H100 80GB HBM3 | Prepared | claim train/llm | dra | 2026-09-21T14:13:20Z
        units: gpu-4 | GPU-4 | NVIDIA H100 80GB HBM3 | Foreign | an unknown process | - | 2026-09-21T14:13:20Z (attention)
        units: gpu-5 | GPU-5 | NVIDIA H100 80GB HBM3 | Foreign | pod default/killed (ended, its process runs on) | - | 2026-09-21T14:13:20Z (attention)
        units: gpu-6 | GPU-6 | NVIDIA H100 80GB HBM3 | Foreign | claim train/llm (ended, its process runs on) | - | 2026-09-21T14:13:20Z (attention)
        units: gpu-7 | GPU-7 | NVIDIA H100 80GB HBM3 | Foreign | perhaps pod default/old | - | 2026-09-21T14:13:20Z (attention)
        units: gpu-8 | GPU-8 | NVIDIA H100 80GB HBM3 | FreeLegacy | - | legacy | -
        units: gpu-9 | GPU-9 | NVIDIA H100 80GB HBM3 | FreeDra | - | dra | -
        units: gpu-10 | GPU-10 | NVIDIA H100 80GB HBM3 | Lost | - | dra | - (attention)
        limits: 
        limiting: NvmlAnswering since 2026-09-21T14:13:22Z: no library: libnvidia-ml.so.1
        limiting: NoStatusRight since 2026-09-21T14:13:22Z: the right to patch nodes/status is missing
        asked: status, title: node-1 - gpu-bridge, markup: 0
    "#]],
    );
}

#[test]
fn what_a_daemon_says_instead_of_a_status_stands_on_the_page() {
    check(
        "503",
        "this daemon waits for another one",
        &expect![[r#"
            node: 
            summary: 
            trouble: The daemon says: this daemon waits for another one
            units: 
            limits: 
            limiting: 
            asked: status, title: , markup: 0
        "#]],
    );
}

#[test]
fn names_of_pods_are_shown_as_they_are_and_are_no_markup() {
    let golden = include_str!("../../../../tests/golden/status.json");
    let mut page: serde_json::Value = serde_json::from_str(golden).unwrap();
    let unit = page["units"][1].clone();
    page["units"] = serde_json::json!([unit]);
    page["units"][0]["holds"][0]["pod"]["name"] = "<img src=x onerror=alert(1)>".into();
    page["conditions"] = serde_json::json!([]);
    check(
        "200",
        &page.to_string(),
        &expect![[r#"
        node: node-1
        summary: mode both, limits: legacy 5, dra none; free: 1 for counted pods, 0 for claims; ledger Serving, generation 12; version (of the build)
        trouble (hidden): 
        units: gpu-1 | GPU-1 | NVIDIA H100 80GB HBM3 | Bound | pod default/<img src=x onerror=alert(1)> | legacy | 2026-09-21T14:13:20Z
        limits (hidden): 
        limiting: 
        asked: status, title: node-1 - gpu-bridge, markup: 0
    "#]],
    );
}
