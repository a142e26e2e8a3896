//! The configuration file as anybody may have written it. Here for the property tests below, and for `fuzz/`.

use super::schema;

/// Reads a text as a configuration file, and words what is wrong with it.
///
/// # Panics
/// It is refused without a word, which is what this looks for, beside panics of others.
pub fn read_config(text: &str) {
    if let Ok(Err(mistakes)) = schema::parse(text) {
        assert!(!mistakes.is_empty(), "a file is not refused without a word");
        for mistake in mistakes {
            drop(mistake.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    /// A file takes a moment, however it is made: what takes longer than this, on the busiest machine, grows faster than
    /// the file. What did was at work for hours.
    const A_MOMENT: Duration = Duration::from_secs(60);
    /// As large as makes the difference, and no ConfigMap is much larger.
    const FILE_BYTES: usize = 100_000;

    /// Lines that look like those of a configuration.
    fn lines() -> impl Strategy<Value = String> {
        let key = prop::sample::select(vec![
            "apiVersion",
            "mode",
            "limits",
            "legacy",
            "dra",
            "offers",
            "weights",
            "settle",
            "dwell",
            "quiet",
            "notice",
            "demand",
            "allocation",
            "prefer",
            "ignoreProcesses",
            "devicePlugin",
            "deviceListStrategy",
            "passDeviceSpecs",
            "devices",
            "index",
            "faces",
            "profiles",
            "a",
            "version",
            "flags",
            "<<",
            "?",
            "-",
            "",
        ]);
        let value = prop_oneof![
            Just("gpu-bridge.dev/v1alpha1".to_owned()),
            Just("both".to_owned()),
            any::<i64>().prop_map(|number| number.to_string()),
            Just("1e999".to_owned()),
            Just("999999999999999999999h".to_owned()),
            Just("-0s".to_owned()),
            Just("&a [*a]".to_owned()),
            Just("!!binary AAAA".to_owned()),
            Just("!custom {a: b}".to_owned()),
            Just("|".to_owned()),
            any::<String>(),
        ];
        let line = (0_usize..4, key, value)
            .prop_map(|(depth, key, value)| format!("{}{key}: {value}", "  ".repeat(depth)));
        prop::collection::vec(line, 0..12).prop_map(|lines| lines.join("\n"))
    }

    proptest! {
        #[test]
        fn no_text_makes_the_configuration_reader_panic(text in any::<String>()) {
            read_config(&text);
        }

        #[test]
        fn no_lines_make_the_configuration_reader_panic(text in lines()) {
            read_config(&text);
        }
    }

    /// A file of this many bytes, all made of one piece, each time with its number in it where it has a place for one.
    fn made_of(piece: &str) -> String {
        let pieces = 0..FILE_BYTES / piece.len();
        let text = pieces.map(|number| piece.replace('#', &number.to_string()));
        text.collect()
    }

    #[test]
    fn a_large_file_made_of_one_piece_is_done_with_in_a_moment() {
        for piece in [
            "[",
            "{",
            "[{a: ",
            "'[' [",
            "- ",
            "- - ",
            "? ",
            "a: ",
            "a#: 1\n",
            "a: 1\n",
            "- x\n",
            " ",
            "\t",
            "\"",
            "'",
            "|\n",
            "&a# ",
            "&a# x\n",
            "*a ",
            "!t ",
            "!t# x\n",
            "---\n",
            "...\n",
            "%YAML 1.2\n",
            "x",
            "x\n",
            ",",
            "a#,",
            "\u{feff}",
            "\\",
            "]",
            "}",
            "<<: *a\n",
        ] {
            let started = Instant::now();
            read_config(&made_of(piece));
            let prefix = "apiVersion: gpu-bridge.dev/v1alpha1\nignoreProcesses: [";
            read_config(&format!("{prefix}{}]", made_of(piece)));
            let taken = started.elapsed();
            assert!(taken < A_MOMENT, "{piece:?} repeated took {taken:?}");
        }
    }

    #[test]
    fn a_file_that_refers_to_itself_without_end_is_refused_in_a_moment() {
        let started = Instant::now();
        let mut laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for number in 1..30 {
            let before = format!("*a{}, ", number - 1).repeat(9);
            laughs.push_str(&format!("a{number}: &a{number} [{before}]\n"));
        }
        schema::parse(&laughs).unwrap_err();
        assert!(started.elapsed() < A_MOMENT, "{:?}", started.elapsed());
    }
}
