//! `make demo`, whole: with the daemon of this build, and against the README.
#![allow(
    clippy::unwrap_used,
    reason = "a demo that can't be played has to fail the test"
)]

use std::path::Path;

/// Plays the demo; returns what it printed, or its error.
async fn play(program: &str) -> (String, anyhow::Result<Vec<demo::Shown>>) {
    let mut out = Vec::new();
    let shown = demo::play(Path::new(program), &mut out).await;
    (String::from_utf8(out).unwrap(), shown)
}

fn readme() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    std::fs::read_to_string(file).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_shows_what_the_readme_says() {
    let (told, shown) = play(env!("CARGO_BIN_EXE_gpu-bridge")).await;
    let shown = shown.unwrap_or_else(|error| panic!("{error:#}\n{told}"));
    assert_eq!(shown.len(), 6, "{told}");
    let readme = readme();
    for (number, shown) in (1..).zip(&shown) {
        let heading = format!("{number}/6 {}", shown.chapter.title);
        let promise = shown.chapter.promise;
        for line in [&heading, &shown.seen] {
            assert!(told.contains(line), "the demo does not tell: {line}");
            assert!(readme.contains(line), "the README does not show: {line}");
        }
        assert!(readme.contains(&format!("**{promise}**")), "{promise}");
    }
    // Its tables are those of `gpu-bridge status`.
    let heads = |text: &str| {
        let mut lines = text.lines().map(str::split_whitespace);
        let head = lines.find(|words| words.clone().next() == Some("GPU"));
        head.map(|words| words.collect::<Vec<_>>().join(" "))
    };
    assert!(heads(&told).is_some());
    assert_eq!(heads(&readme), heads(&told), "the README's table is old");
}

#[tokio::test]
async fn a_daemon_that_is_none_ends_the_demo_with_the_chapter_and_what_was_expected() {
    let (_, shown) = play("/bin/false").await;
    let error = format!("{:#}", shown.unwrap_err());
    for part in ["chapter 1", "One daemon serves", "has ended"] {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
}
