//! Changes one key in the text of a configuration and leaves the rest as it is, comments included.

use std::path::Path;

use bridge_core::Mode;

use super::Document;
use super::load::{self, Error};

/// What a text means that is no file: of the ConfigMap that `origin` names.
///
/// # Errors
/// It is no good configuration.
pub fn read_text(origin: &Path, text: String) -> Result<Document, Error> {
    load::interpret(origin, load::check_size(text))
}

/// The text with another mode for all nodes without a profile of their own mode; `None`: its shape leaves no place
/// where that could be written, and somebody has to do it by hand.
#[must_use]
pub fn with_mode(origin: &Path, text: &str, mode: Mode) -> Option<String> {
    let before = read_text(origin, text.to_owned()).ok()?;
    let line = format!("mode: {}", mode.as_str());
    let is_mode = |line: &str| line.starts_with("mode:");
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if let Some(place) = lines.iter().position(|line| is_mode(line)) {
        let comment = lines[place].find(" #").map(|at| lines[place].split_off(at));
        lines[place] = format!("{line}{}", comment.unwrap_or_default());
    } else {
        let version = lines.iter().position(|it| it.starts_with("apiVersion:"))?;
        lines.insert(version + 1, line);
    }
    let changed = lines.join("\n") + "\n";
    let after = read_text(origin, changed.clone()).ok()?;
    let mut expected = before;
    expected.base.settings.mode = mode;
    (after.base == expected.base).then_some(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(text: &str) -> Option<String> {
        with_mode(Path::new("config.yaml"), text, Mode::Dra)
    }

    #[test]
    fn the_mode_alone_is_changed() {
        let text = "# Ours.\napiVersion: gpu-bridge.dev/v1alpha1\nmode: both # for now\nlimits:\n  dra: 2\n";
        let expected = "# Ours.\napiVersion: gpu-bridge.dev/v1alpha1\nmode: dra # for now\nlimits:\n  dra: 2\n";
        assert_eq!(changed(text).as_deref(), Some(expected));
        let text = "apiVersion: gpu-bridge.dev/v1alpha1\nprofiles:\n  a:\n    mode: legacy\n";
        let expected =
            "apiVersion: gpu-bridge.dev/v1alpha1\nmode: dra\nprofiles:\n  a:\n    mode: legacy\n";
        assert_eq!(changed(text).as_deref(), Some(expected));
    }

    #[test]
    fn a_text_without_a_place_for_it_is_left_alone() {
        for text in [
            "{apiVersion: gpu-bridge.dev/v1alpha1, mode: both}\n",
            "apiVersion: gpu-bridge.dev/v1alpha1\nmode: both\nlimts: {}\n",
            "version: v1\nflags: {}\n",
            "",
        ] {
            assert_eq!(changed(text), None, "{text}");
        }
    }
}
