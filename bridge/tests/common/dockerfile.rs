//! What `manifests/Dockerfile` says, as far as it can be held against the rest without building it: `make image` does.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Of the libraries that the program asks the loader for, those that every image of Debian has.
const IN_EVERY_IMAGE: [&str; 4] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words behind an instruction, of each line that is one.
fn instructions(dockerfile: &str, name: &str) -> Vec<Vec<String>> {
    let lines = dockerfile.lines().map(str::split_whitespace);
    lines
        .filter_map(|mut words| {
            (words.next() == Some(name)).then(|| words.map(str::to_owned).collect())
        })
        .collect()
}

/// What follows `key = "` in a file of TOML.
fn quoted(text: &str, key: &str) -> String {
    let start = format!("{key} = \"");
    let line = text.lines().find_map(|line| line.strip_prefix(&start));
    let line = line.unwrap_or_else(|| panic!("there is no {key}"));
    line.trim_end_matches('"').to_owned()
}

#[test]
fn the_image_has_the_program_that_the_daemonset_starts_made_by_the_compiler_of_the_tests() {
    let dockerfile = read("manifests/Dockerfile");
    let from = instructions(&dockerfile, "FROM");
    let [build, image] = &from[..] else {
        panic!("{from:?}")
    };
    let compiler = quoted(&read("rust-toolchain.toml"), "channel");
    // The C library of the build is not newer than that of the image.
    let release = image[0].strip_prefix("debian:").unwrap();
    let release = release.strip_suffix("-slim").unwrap();
    assert_eq!(
        build[..],
        [&format!("rust:{compiler}-{release}"), "AS", "build"]
    );

    let run = instructions(&dockerfile, "RUN");
    assert_eq!(run.len(), 1, "what else is built is not tested");
    assert_eq!(
        run[0].join(" "),
        "cargo build --locked --release -p gpu-bridge"
    );
    let copied = instructions(&dockerfile, "COPY");
    let [sources, program] = &copied[..] else {
        panic!("{copied:?}")
    };
    assert_eq!(sources[..], [".", "."]);
    let built = format!(
        "{}/target/release/{}",
        instructions(&dockerfile, "WORKDIR")[0][0],
        super::NAME
    );
    let installed = format!("/usr/bin/{}", super::NAME);
    assert_eq!(
        program[..],
        ["--from=build", built.as_str(), installed.as_str()]
    );
    let start = instructions(&dockerfile, "ENTRYPOINT").concat().concat();
    assert_eq!(start, format!("[\"{installed}\"]"));
    let container = super::container();
    assert_eq!(container.command, None, "the image says what is started");
    for probe in [container.liveness_probe, container.readiness_probe] {
        let exec = probe.unwrap().exec.unwrap().command.unwrap();
        assert_eq!(exec[0], super::NAME, "it is found in /usr/bin");
    }

    let version = env!("CARGO_PKG_VERSION");
    let image = format!("{}:{version}", super::NAME);
    assert_eq!(container.image.as_deref(), Some(image.as_str()));
    assert!(dockerfile.contains(&format!(
        "docker build -f manifests/Dockerfile -t {image} ."
    )));
    let ignored: BTreeSet<String> = read(".dockerignore").lines().map(str::to_owned).collect();
    for needed in [
        "Cargo.lock",
        "bridge",
        "legacy-proto",
        "tests",
        "tests/fake-nvml",
    ] {
        assert!(
            !ignored.contains(needed),
            "{needed} is left out of the build"
        );
    }
}

#[test]
fn the_program_needs_no_library_that_the_image_lacks() {
    let Ok(output) = Command::new("readelf")
        .args(["--dynamic", "--wide", env!("CARGO_BIN_EXE_gpu-bridge")])
        .output()
    else {
        panic!("readelf is missing: install binutils, which a C compiler needs too")
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let needed: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .collect();
    assert!(needed.contains(&"libc.so.6"), "{text}");
    for library in needed {
        assert!(
            IN_EVERY_IMAGE.contains(&library),
            "{library} is not in debian-slim"
        );
    }
}
