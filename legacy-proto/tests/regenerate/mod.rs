//! Makes the Rust of `.proto` files anew and compares it with what is committed. Used by the tests of
//! both proto crates.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Set to `1`, the committed text is rewritten where it differs, instead of the test failing.
const UPDATE: &str = "UPDATE_PROTO";

/// Checks `<package>/src/generated` against `<package>/proto`.
///
/// `protos` holds pairs of a proto file's stem and the folder of its Rust. Each proto has a folder of its
/// own: two of upstream's say `package v1`, and in one folder the second would overwrite the first.
pub(crate) fn check(package: &Path, protos: &[(&str, &str)]) {
    let committed_dir = package.join("src/generated");
    let scratch = tempfile::tempdir().expect("a temporary folder");
    for (stem, dir) in protos {
        let out = scratch.path().join(dir);
        fs::create_dir_all(&out).expect("a folder for the generated Rust");
        generate(&package.join("proto"), stem, &out);
    }
    let fresh = read_tree(scratch.path());
    let committed = read_tree(&committed_dir);
    if fresh == committed {
        return;
    }
    let differing: BTreeSet<&String> = fresh
        .keys()
        .chain(committed.keys())
        .filter(|name| fresh.get(*name) != committed.get(*name))
        .collect();
    if std::env::var(UPDATE).as_deref() == Ok("1") {
        rewrite(&committed_dir, &fresh);
        return;
    }
    panic!(
        "{} does not match the .proto files (differing: {differing:?}). Run \
         `{UPDATE}=1 cargo test -p {}` and commit the result.",
        committed_dir.display(),
        package.file_name().unwrap_or_default().to_string_lossy(),
    );
}

fn generate(proto_dir: &Path, stem: &str, out: &Path) {
    let file = format!("{stem}.proto");
    let descriptors = protox::compile([&file], [proto_dir])
        .unwrap_or_else(|error| panic!("{file} does not compile: {error}"));
    tonic_prost_build::configure()
        // Ordered maps, so that equal messages are equal bytes.
        .btree_map(".")
        .out_dir(out)
        .compile_fds(descriptors)
        .unwrap_or_else(|error| panic!("no Rust could be made of {file}: {error}"));
}

fn rewrite(dir: &Path, files: &BTreeMap<String, String>) {
    if dir.exists() {
        fs::remove_dir_all(dir).expect("the old generated Rust can be removed");
    }
    for (name, text) in files {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().expect("a file in a folder")).expect("its folder");
        fs::write(path, text).expect("the generated Rust can be written");
    }
}

/// All files one folder down, as `folder/file` to text.
fn read_tree(dir: &Path) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let Ok(folders) = fs::read_dir(dir) else {
        return files;
    };
    for folder in folders {
        let folder = folder.expect("a folder entry");
        for file in fs::read_dir(folder.path()).expect("generated folders hold files") {
            let file = file.expect("a file entry");
            let name = format!(
                "{}/{}",
                folder.file_name().to_string_lossy(),
                file.file_name().to_string_lossy()
            );
            files.insert(name, fs::read_to_string(file.path()).expect("UTF-8 text"));
        }
    }
    files
}
